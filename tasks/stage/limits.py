"""How long stages and runs may take, and how much memory what they start: so that nothing hangs until the morning.

::

    limits: {run: 20 h, stage: 6 h, stages: {merge: 2 h}, memory: 20GB}      # in a profile
    with limited(profile.limits): ...                                         # a whole run
    with within_limit("merge"): ...                                           # one call of a stage

When time is up, what the main thread is doing ends as if a person had interrupted it: processes that it started end,
files that it was writing stay unfinished, and stages that can go on from there do so in the next run. A stage beside
others, in a thread of a runner, cannot be interrupted; the limit of the run ends it. Where the main thread itself no
longer answers (it waits for a disk that is gone), the process ends some minutes after the run's limit, as if killed.
Limits are in no key.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput, MergegateError, OutOfTime, suggest
from mergegate.merge_core.wording import format_duration, parse_bytes, parse_duration

_GIVEN_UP_AFTER = 300.0  # seconds beyond the limit of a run in which the main thread may still end by itself
_EXIT_CODE = 1
_log = logging.getLogger(__name__)


def _readable_by(parse: Callable[[str, str], object]) -> AfterValidator:
    """Settings that are kept as people write them, and are known to mean something."""

    def readable(text: str) -> str:
        try:
            parse(text, "")
        except MergegateError as error:
            raise ValueError(f"{error.found}: expected {error.expected}") from None
        return text

    return AfterValidator(readable)


TimeSpan = Annotated[str, _readable_by(parse_duration)]
Amount = Annotated[str, _readable_by(parse_bytes)]


class Limits(BaseModel):
    """Of one run, in a profile under ``limits``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: TimeSpan = Field(default="24 h", description="The whole run, waiting for a person left out.")
    stage: TimeSpan = Field(default="12 h", description="Each call of a stage, downloads and waiting included.")
    stages: Mapping[str, TimeSpan] = Field(default={}, description="Of single stages: {merge: 2 h}.")
    memory: Amount | None = Field(
        default=None,
        description="Of a process that loads models, with all that it maps for itself: 20GB. Absent: the machine's.",
    )

    def seconds_of(self, stage: str) -> float:
        """Of one call of ``stage``."""
        return parse_duration(self.stages.get(stage, self.stage), f"limits.stages.{stage}")

    def bytes_of_memory(self) -> int | None:
        """Of a process that loads models; None: as otherwise."""
        return None if self.memory is None else parse_bytes(self.memory, "limits.memory")

    def require_known(self) -> None:
        """See that all stages are such.

        Raises:
            InvalidInput: naming the first that is none.
        """
        for name in self.stages:
            if name not in _declared:
                raise InvalidInput(
                    f"limits.stages.{name}",
                    found="no such stage",
                    expected=f"one of {', '.join(sorted(_declared))}",
                    remedy=suggest(name, _declared),
                )


@dataclass(eq=False)
class _Deadline:
    """When something has to be over."""

    at: float  # monotonic seconds
    seconds: float
    what: str
    setting: str

    def refusal(self) -> OutOfTime:
        return OutOfTime(
            self.what,
            found=f"not over after {format_duration(self.seconds)}",
            expected=f"less: the limit is {self.setting}",
            remedy=f"see what it was waiting for; if it needs more time, raise {self.setting} in the profile. What is "
            "finished is kept: the next run goes on from there",
        )


class _TimeIsUp(BaseException):
    """Raised in the main thread by the alarm. Not an ``Exception``: nobody on the way may take it for an error of
    theirs."""

    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self.deadline = deadline


_limits: ContextVar[Limits | None] = ContextVar("limits", default=None)
_child_memory: ContextVar[int | None] = ContextVar("child memory", default=None)
_declared: set[str] = set()
_deadlines: list[_Deadline] = []  # of the main thread, outermost first


def declare_stage(name: str) -> None:
    """Make ``name`` known as one that may have a limit."""
    _declared.add(name)


@contextmanager
def limited(limits: Limits) -> Iterator[None]:
    """A run that ends when its time is up, and stages in it that end when theirs is.

    Raises:
        InvalidInput: for a limit of a stage that there is not.
        OutOfTime: when the run takes longer.
    """
    limits.require_known()
    token, memory = _limits.set(limits), _child_memory.set(limits.bytes_of_memory())
    seconds = parse_duration(limits.run, "limits.run")
    backstop = threading.Timer(seconds + _GIVEN_UP_AFTER, _give_up, (seconds,))
    backstop.daemon = True
    backstop.start()
    try:
        with _until(_Deadline(time.monotonic() + seconds, seconds, "the run", "limits.run")):
            yield
    finally:
        backstop.cancel()
        _child_memory.reset(memory)
        _limits.reset(token)


def memory_of_child(otherwise: int | None) -> int | None:
    """Bytes of memory that a process may have for itself which is started now: the run's limit, or ``otherwise``."""
    limit = _child_memory.get()
    return otherwise if limit is None else limit


@contextmanager
def within_limit(stage: str) -> Iterator[None]:
    """One call of a stage, within the limits of its run, if it has any.

    Raises:
        OutOfTime: when it takes longer, or the run does.
    """
    limits = _limits.get()
    if limits is None:
        yield
        return
    seconds = limits.seconds_of(stage)
    setting = f"limits.stages.{stage}" if stage in limits.stages else "limits.stage"
    with _until(_Deadline(time.monotonic() + seconds, seconds, stage, setting)):
        yield


@contextmanager
def _until(deadline: _Deadline) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _ring) if not _deadlines else None
    _deadlines.append(deadline)
    try:
        _set_alarm()
        yield
    except _TimeIsUp as up:
        raise up.deadline.refusal() from None
    finally:
        _deadlines.remove(deadline)
        _set_alarm()
        if not _deadlines:
            signal.signal(signal.SIGALRM, before)


def _set_alarm() -> None:
    """For the next deadline; none: off. The timer of the system does not follow its clock when that jumps."""
    pending = [one.at for one in _deadlines if one.at != math.inf]
    signal.setitimer(signal.ITIMER_REAL, max(min(pending) - time.monotonic(), 1e-3) if pending else 0)


def _ring(number: int, frame: object) -> None:
    over = [one for one in _deadlines if one.at <= time.monotonic()]
    if not over:
        _set_alarm()  # a timer may be early by less than its resolution
        return
    for one in over:
        one.at = math.inf  # rung once: what cleans up after it is not to be interrupted
    _set_alarm()
    raise _TimeIsUp(over[0])


def _give_up(seconds: float) -> None:
    _log.critical(
        "the run is not over %s after its limit of %s: this process ends itself",
        format_duration(_GIVEN_UP_AFTER),
        format_duration(seconds),
    )
    logging.shutdown()
    os._exit(_EXIT_CODE)

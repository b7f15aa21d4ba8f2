"""Limit the run time of stages and runs, and the memory of the processes that they start.

::

    limits: {run: 20 h, stage: 6 h, stages: {merge: 2 h}, memory: 20GB}      # in a profile
    with apply_limits(profile.limits): ...                                    # a whole run
    with within_limit("merge"): ...                                           # one call of a stage

When a time limit is reached, mergegate stops the main thread as if the user had interrupted it, and ends the processes
that it started. The next run resumes resumable stages from their unfinished files. A stage in a thread of a task runner
cannot be interrupted, so only the limit of the run applies to it. If the main thread does not respond, for example
because it waits for a lost disk, the process exits five minutes after the limit of the run.

Limits are not part of any key.
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
from mergegate.merge_core.system import system_memory
from mergegate.merge_core.wording import format_duration, parse_bytes, parse_duration

_SHUTDOWN_S = 300.0  # Seconds after the limit of a run in which the main thread can still clean up.
_EXIT_CODE = 1
_log = logging.getLogger(__name__)


def _parsable_by(parse: Callable[[str, str], object]) -> AfterValidator:
    """Return a validator that rejects a text if ``parse`` rejects it. The setting keeps its text."""

    def require_parsable(text: str) -> str:
        try:
            parse(text, "")
        except MergegateError as error:
            raise ValueError(f"{error.found}: expected {error.expected}") from None
        return text

    return AfterValidator(require_parsable)


TimeSpan = Annotated[str, _parsable_by(parse_duration)]
Amount = Annotated[str, _parsable_by(parse_bytes)]


class Limits(BaseModel):
    """Time and memory limits of one run, in a profile under ``limits``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: TimeSpan = Field(default="24 h", description="Time limit of a run, without waiting for approval.")
    stage: TimeSpan = Field(default="12 h", description="Time limit of each call of a stage, with downloads.")
    stages: Mapping[str, TimeSpan] = Field(default={}, description="Time limits of single stages: {merge: 2 h}.")
    memory: Amount | None = Field(
        default=None,
        description="Memory limit of a process that loads models, such as 20GB. Default: the memory of the machine.",
    )

    def require_known_stages(self) -> None:
        """Raise InvalidInput for the first name in ``stages`` that is not the name of a stage."""
        for name in self.stages:
            if name not in _declared:
                raise InvalidInput(
                    f"limits.stages.{name}",
                    found="an unknown stage",
                    expected=f"one of {', '.join(sorted(_declared))}",
                    remedy=suggest(name, _declared),
                )


@dataclass(eq=False)
class _Deadline:
    """Deadline of a run or of one call of a stage."""

    at: float  # Time of the monotonic clock in seconds.
    seconds: float
    subject: str
    setting: str

    def refusal(self) -> OutOfTime:
        return OutOfTime(
            self.subject,
            found=f"still running after {format_duration(self.seconds)}",
            expected=f"an end within {self.setting}",
            remedy=f"find the cause of the delay. If it needs more time, raise {self.setting} in the profile. "
            "Finished work is kept, and the next run resumes from there",
        )


class _TimeIsUp(BaseException):
    """Raised in the main thread by the alarm. It is not an ``Exception``, so that no handler on the way catches it."""

    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self.deadline = deadline


_limits: ContextVar[Limits | None] = ContextVar("limits", default=None)
_child_memory: ContextVar[int | None] = ContextVar("child memory", default=None)
_declared: set[str] = set()
_deadlines: list[_Deadline] = []  # Deadlines of the main thread, outermost first.


def declare_stage(name: str) -> None:
    """Register the name of a stage, so that a profile can set a limit for it."""
    _declared.add(name)


@contextmanager
def apply_limits(limits: Limits) -> Iterator[None]:
    """Apply limits to the run inside the block, and to its stages and processes.

    Raises:
        InvalidInput: The limits name an unknown stage.
        OutOfTime: The run exceeds its time limit.
    """
    limits.require_known_stages()
    memory_limit = None if limits.memory is None else parse_bytes(limits.memory, "limits.memory")
    token, memory = _limits.set(limits), _child_memory.set(memory_limit)
    seconds = parse_duration(limits.run, "limits.run")
    backstop = threading.Timer(seconds + _SHUTDOWN_S, _exit_process, (seconds,))
    backstop.daemon = True
    backstop.start()
    try:
        with _until(_Deadline(time.monotonic() + seconds, seconds, "the run", "limits.run")):
            yield
    finally:
        backstop.cancel()
        _child_memory.reset(memory)
        _limits.reset(token)


def memory_of_child(default: int | None) -> int | None:
    """Return the memory limit of a new process in bytes: that of the run, or ``default`` if the run has none."""
    limit = _child_memory.get()
    return default if limit is None else limit


def memory_of_mapping_child() -> int | None:
    """Return the memory limit of a new process that maps weights, in bytes, or None if the machine's memory is unknown.

    It is that of the run, or twice the memory of the machine. Weights count twice: once when mapped and once when read.
    """
    machine = system_memory()
    return memory_of_child(2 * machine.total if machine else None)


@contextmanager
def within_limit(stage: str) -> Iterator[None]:
    """Apply the time limit of a stage to the block. Without :func:`apply_limits`, there is no limit.

    Raises:
        OutOfTime: The stage or the run exceeds its time limit.
    """
    limits = _limits.get()
    if limits is None:
        yield
        return
    seconds = parse_duration(limits.stages.get(stage, limits.stage), f"limits.stages.{stage}")
    setting = f"limits.stages.{stage}" if stage in limits.stages else "limits.stage"
    with _until(_Deadline(time.monotonic() + seconds, seconds, stage, setting)):
        yield


@contextmanager
def _until(deadline: _Deadline) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGALRM, _on_alarm) if not _deadlines else None
    _deadlines.append(deadline)
    try:
        _set_alarm()
        yield
    except _TimeIsUp as alarm:
        raise alarm.deadline.refusal() from None
    finally:
        _deadlines.remove(deadline)
        _set_alarm()
        if not _deadlines:
            signal.signal(signal.SIGALRM, previous_handler)


def _set_alarm() -> None:
    """Set the alarm for the next deadline, or turn it off if there is none.

    The system timer is not affected when the system clock jumps.
    """
    pending = [deadline.at for deadline in _deadlines if deadline.at != math.inf]
    signal.setitimer(signal.ITIMER_REAL, max(min(pending) - time.monotonic(), 1e-3) if pending else 0)


def _on_alarm(number: int, frame: object) -> None:
    expired = [deadline for deadline in _deadlines if deadline.at <= time.monotonic()]
    if not expired:
        _set_alarm()  # A timer may fire early by less than its resolution.
        return
    for deadline in expired:
        deadline.at = math.inf  # Fire only once, so that the cleanup is not interrupted.
    _set_alarm()
    raise _TimeIsUp(expired[0])


def _exit_process(seconds: float) -> None:
    _log.critical(
        "the run is still running %s after its limit of %s: this process ends itself",
        format_duration(_SHUTDOWN_S),
        format_duration(seconds),
    )
    logging.shutdown()
    os._exit(_EXIT_CODE)

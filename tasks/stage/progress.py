"""Watching a run: stages tell whoever watches that they started, how far they are, and how they ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from mergegate.merge_core.errors import MergegateError, Refused
from mergegate.merge_core.wording import format_duration
from mergegate.tasks.stage.pulse import Pulse

StageStatus = Literal["made", "cached", "rebuilt", "refused", "failed"]
_SEVERITY: tuple[StageStatus, ...] = ("cached", "made", "rebuilt", "refused", "failed")
_MARKS: dict[StageStatus, str] = {"made": "✓", "cached": "=", "rebuilt": "✓", "refused": "✗", "failed": "✗"}


class Watcher(Protocol):
    """Whoever shows a run while it works. ``subject`` tells calls of one stage apart: the checkpoint's name, or ''."""

    def announced(self, text: str) -> None: ...
    def started(self, stage: str, subject: str) -> None: ...
    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None: ...
    def described(self, stage: str, subject: str, say: Callable[[int], str]) -> None: ...
    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None: ...


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_running: ContextVar[tuple[str, str, str]] = ContextVar("running", default=("", "", ""))


@contextmanager
def progress_watcher(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` about every stage that is called inside."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def is_watched() -> bool:
    """Whether anybody watches already."""
    return _watcher.get() is not None


def watcher_or(otherwise: Callable[[], Watcher]) -> Watcher:
    """Who watches, or who is to watch where nobody does."""
    return _watcher.get() or otherwise()


def running_stage() -> tuple[str, str, str]:
    """Name, subject and key of the stage that runs; empty where none does."""
    return _running.get()


def advance(done: int, total: int, unit: str) -> None:
    """Say how far the running stage has come: ``done`` of ``total`` in ``unit`` ('B', 'documents')."""
    if (watcher := _watcher.get()) is not None:
        watcher.advanced(*_running.get()[:2], done, total, unit)


def say_progress(say: Callable[[int], str]) -> None:
    """Say where the running stage is in words of its own, where a count alone says too little.

    Args:
        say: The line, in at most so many characters.
    """
    if (watcher := _watcher.get()) is not None:
        watcher.described(*_running.get()[:2], say)


def announce(text: str) -> None:
    """Say what begins now, above the stages that follow."""
    if (watcher := _watcher.get()) is not None:
        watcher.announced(text)


@dataclass
class StageReport:
    """How a stage will be said to have ended; the stage fills it in before it returns."""

    status: StageStatus = "failed"
    summary: str = ""


@contextmanager
def report_stage(name: str, subject: str, key: str = "") -> Iterator[StageReport]:
    """Tell the watcher that a stage runs and how it ended; ``advance`` inside speaks for this stage.

    Args:
        key: Under which the store has what it makes, if it does.
    """
    watcher = _watcher.get()
    report = StageReport()
    token = _running.set((name, subject, key))
    if watcher:
        watcher.started(name, subject)
    began = time.monotonic()
    try:
        yield report
    except MergegateError as error:
        report.status = "refused" if isinstance(error, Refused) else "failed"
        report.summary = report.summary or error.found
        raise
    except BaseException:
        report.status = "failed"
        raise
    finally:
        if watcher:
            watcher.ended(name, subject, report.status, time.monotonic() - began, report.summary)
        _running.reset(token)


class StageEnd(NamedTuple):
    """That a stage has run, and how it ended."""

    stage: str
    subject: str
    status: StageStatus
    seconds: float
    summary: str


def joint_status(calls: Sequence[tuple[str, StageStatus]]) -> StageStatus:
    """How several calls of one stage came out: the worst of them, but for a no that a later call about the same subject
    took back. A gate that looks twice has said what it said last.

    Args:
        calls: Subject and end of each, in the order in which they ended; at least one.
    """
    last = {subject: at for at, (subject, _) in enumerate(calls)}
    kept = [end for at, (subject, end) in enumerate(calls) if end not in ("refused", "failed") or at == last[subject]]
    return max(kept, key=_SEVERITY.index)


class DeferredProgress:
    """A ``Watcher`` where nobody looks: it keeps how stages ended, to be told elsewhere (``retell``)."""

    def __init__(self) -> None:
        self.stages: tuple[StageEnd, ...] = ()

    def announced(self, text: str) -> None:
        """Nothing: what begins is said where somebody looks."""

    def started(self, stage: str, subject: str) -> None:
        """Nothing: by the time that anybody hears of it, it has ended."""

    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None:
        """Nothing, as at the start."""

    def described(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        """Nothing, as at the start."""

    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        self.stages += (StageEnd(stage, subject, status, seconds, summary),)


class RelayedProgress:
    """A ``Watcher`` that passes everything on to another one: what else is to be done with it is another class's."""

    def __init__(self, other: Watcher) -> None:
        self._other = other

    def announced(self, text: str) -> None:
        self._other.announced(text)

    def started(self, stage: str, subject: str) -> None:
        self._other.started(stage, subject)

    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None:
        self._other.advanced(stage, subject, done, total, unit)

    def described(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        self._other.described(stage, subject, say)

    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        self._other.ended(stage, subject, status, seconds, summary)


class RecordedProgress(RelayedProgress):
    """A ``Watcher`` that notes how stages ended, and passes it on."""

    def __init__(self, other: Watcher) -> None:
        super().__init__(other)
        self.stages: list[StageEnd] = []  # in the order in which they ended

    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        self.stages.append(StageEnd(stage, subject, status, seconds, summary))
        super().ended(stage, subject, status, seconds, summary)


@contextmanager
def recorded_stages(otherwise: Callable[[], Watcher]) -> Iterator[RecordedProgress]:
    """Note how the stages that are called inside end, and tell whoever watches already.

    Args:
        otherwise: Who is told where nobody watches.
    """
    noted = RecordedProgress(watcher_or(otherwise))
    with progress_watcher(noted):
        yield noted


def relay_progress(stages: Iterable[StageEnd]) -> None:
    """Tell the watcher of stages that ran in another process."""
    if (watcher := _watcher.get()) is not None:
        for one in stages:
            watcher.started(one.stage, one.subject)
            watcher.ended(*one)


class ProgressLog:
    """A ``Watcher`` for runs that nobody watches, such as those of a worker: a log line at each end of a stage, and of
    a long one how far it is."""

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> None:
        self._log = log
        self._pulse = Pulse(log.info)

    def announced(self, text: str) -> None:
        self._log.info(text)

    def started(self, stage: str, subject: str) -> None:
        """No line: Prefect logs that itself."""
        self._pulse.started(stage, subject)

    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None:
        self._pulse.advanced(stage, subject, done, total, unit)

    def described(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        self._pulse.described(stage, subject, say)

    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        self._pulse.ended(stage, subject)
        words = " ".join(part for part in (stage, subject) if part)
        self._log.info("%s %s: %s (%s)", _MARKS[status], words, summary, format_duration(seconds))

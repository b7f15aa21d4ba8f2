"""Watching a run: stages tell whoever watches that they started, how far they are, and how they ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from merge_core.errors import MergegateError, Refused
from merge_core.units import format_duration

StageStatus = Literal["made", "cached", "rebuilt", "refused", "failed"]
_MARKS: dict[StageStatus, str] = {"made": "✓", "cached": "=", "rebuilt": "✓", "refused": "✗", "failed": "✗"}


class Watcher(Protocol):
    """Whoever shows a run while it works. ``subject`` tells calls of one stage apart: the checkpoint's name, or ''."""

    def announced(self, text: str) -> None: ...
    def started(self, stage: str, subject: str) -> None: ...
    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None: ...
    def described(self, stage: str, subject: str, say: Callable[[int], str]) -> None: ...
    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None: ...


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_running: ContextVar[tuple[str, str]] = ContextVar("running", default=("", ""))


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` about every stage that is called inside."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def is_watched() -> bool:
    """Whether anybody watches already."""
    return _watcher.get() is not None


def advance(done: int, total: int, unit: str) -> None:
    """Say how far the running stage has come: ``done`` of ``total`` in ``unit`` ('B', 'documents')."""
    if (watcher := _watcher.get()) is not None:
        watcher.advanced(*_running.get(), done, total, unit)


def say_progress(say: Callable[[int], str]) -> None:
    """Say where the running stage is in words of its own, where a count alone says too little.

    Args:
        say: The line, in at most so many characters.
    """
    if (watcher := _watcher.get()) is not None:
        watcher.described(*_running.get(), say)


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
def report_stage(name: str, subject: str) -> Iterator[StageReport]:
    """Tell the watcher that a stage runs and how it ended; ``advance`` inside speaks for this stage."""
    watcher = _watcher.get()
    report = StageReport()
    if watcher:
        watcher.started(name, subject)
    token = _running.set((name, subject))
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
        _running.reset(token)
        if watcher:
            watcher.ended(name, subject, report.status, time.monotonic() - began, report.summary)


class StageEnd(NamedTuple):
    """That a stage has run, and how it ended."""

    stage: str
    subject: str
    status: StageStatus
    seconds: float
    summary: str


class HeldProgress:
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


def retell(stages: Iterable[StageEnd]) -> None:
    """Tell the watcher of stages that ran in another process."""
    if (watcher := _watcher.get()) is not None:
        for one in stages:
            watcher.started(one.stage, one.subject)
            watcher.ended(*one)


class ProgressLog:
    """A ``Watcher`` for runs that nobody watches, such as those of a worker: a log line at each end of a stage."""

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> None:
        self._log = log

    def announced(self, text: str) -> None:
        self._log.info(text)

    def started(self, stage: str, subject: str) -> None:
        """Nothing: Prefect logs that itself."""

    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None:
        """Nothing: a log is no place for bars."""

    def described(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        """Nothing, for the same reason."""

    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        words = " ".join(part for part in (stage, subject) if part)
        self._log.info("%s %s: %s (%s)", _MARKS[status], words, summary, format_duration(seconds))

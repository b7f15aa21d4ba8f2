"""Report the start, progress and end of each stage to a watcher, such as the terminal or a log.

``join_progress`` reports several calls of one stage, such as those for the parts of a task, as a single call.
``Pulse`` logs a line about each call with count, speed and remaining time every 30 seconds::

    evaluate merge on copy: 412 of 1,319 requests · 35/s · 26 s left
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.wording import format_bytes, format_duration

StageStatus = Literal["made", "cached", "rebuilt", "refused", "failed"]
_SEVERITY: tuple[StageStatus, ...] = ("cached", "made", "rebuilt", "refused", "failed")
_MARKS: dict[StageStatus, str] = {"made": "✓", "cached": "=", "rebuilt": "✓", "refused": "✗", "failed": "✗"}


class Watcher(Protocol):
    """Receiver of progress reports.

    ``subject`` distinguishes the calls of one stage, for example by the name of a checkpoint. It may be empty.
    """

    def on_message(self, text: str) -> None: ...
    def on_start(self, stage: str, subject: str) -> None: ...
    def on_progress(self, stage: str, subject: str, count: int, total: int, unit: str) -> None: ...
    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None: ...
    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None: ...


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_running: ContextVar[tuple[str, str, str]] = ContextVar("running", default=("", "", ""))


W = TypeVar("W", bound=Watcher)


@contextmanager
def progress_watcher(watcher: W) -> Iterator[W]:
    """Report every stage inside the block to ``watcher``, and yield the watcher."""
    token = _watcher.set(watcher)
    try:
        yield watcher
    finally:
        _watcher.reset(token)


def current_watcher(default: Callable[[], Watcher]) -> Watcher:
    """Return the current watcher, or a new one from ``default`` if none is set."""
    return _watcher.get() or default()


def running_stage() -> tuple[str, str, str]:
    """Return the name, subject and key of the running stage, or empty strings if no stage is running."""
    return _running.get()


def advance(count: int, total: int, unit: str) -> None:
    """Report the progress of the running stage: ``count`` of ``total`` in ``unit``, such as 'B' or 'documents'."""
    if (watcher := _watcher.get()) is not None:
        watcher.on_progress(*_running.get()[:2], count, total, unit)


def describe_progress(say: Callable[[int], str]) -> None:
    """Report the progress of the running stage as text, for stages that a count does not describe well.

    ``say`` returns the text. Its argument is the largest number of characters to use.
    """
    if (watcher := _watcher.get()) is not None:
        watcher.on_description(*_running.get()[:2], say)


def announce(text: str) -> None:
    """Show ``text`` to the watcher, as a heading for the stages that follow."""
    if (watcher := _watcher.get()) is not None:
        watcher.on_message(text)


@dataclass
class StageReport:
    """Status and summary of a running stage, set before the stage ends."""

    status: StageStatus = "failed"
    summary: str = ""


@contextmanager
def report_stage(name: str, subject: str, key: str = "") -> Iterator[StageReport]:
    """Report the block as a stage: its start, its end, and the progress that ``advance`` reports inside it.

    ``subject`` may be empty. ``key`` is that of the stage's artifact, and empty for a stage without one.
    """
    watcher = _watcher.get()
    report = StageReport()
    token = _running.set((name, subject, key))
    if watcher:
        watcher.on_start(name, subject)
    began = time.monotonic()
    try:
        yield report
    except MergegateError as error:
        report.status = "refused" if error.status == "refused" else "failed"
        report.summary = report.summary or error.found
        raise
    except BaseException as error:
        cause = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        report.status, report.summary = "failed", report.summary or cause
        raise
    finally:
        if watcher:
            watcher.on_end(name, subject, report.status, time.monotonic() - began, report.summary)
        _running.reset(token)


class StageEnd(NamedTuple):
    """End of a stage call."""

    stage: str
    subject: str  # Model or task of the call. May be empty.
    status: StageStatus  # ``made`` or ``rebuilt`` if the stage ran, ``cached`` if it did not.
    seconds: float
    summary: str  # Result in a few words.


def joint_status(calls: Sequence[tuple[str, StageStatus]]) -> StageStatus:
    """Return the most severe status of several calls of one stage.

    ``calls`` holds the subject and status of at least one call, in the order in which they ended. A refusal or failure
    counts only if it is the last call for its subject: a gate that refuses at one interim look and passes at the next
    has passed.
    """
    last = {subject: index for index, (subject, _) in enumerate(calls)}
    relevant = [
        status
        for index, (subject, status) in enumerate(calls)
        if status not in ("refused", "failed") or index == last[subject]
    ]
    return max(relevant, key=_SEVERITY.index)


class DeferredProgress:
    """``Watcher`` that collects the ends of stages, for a report in another process by :func:`relay_progress`.

    It ignores everything else, because each stage will have ended before it is reported.
    """

    def __init__(self) -> None:
        self.stages: tuple[StageEnd, ...] = ()

    def on_message(self, text: str) -> None: ...
    def on_start(self, stage: str, subject: str) -> None: ...
    def on_progress(self, stage: str, subject: str, count: int, total: int, unit: str) -> None: ...
    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None: ...

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        self.stages += (StageEnd(stage, subject, status, seconds, summary),)


class RelayedProgress:
    """``Watcher`` that forwards everything to another one. Base class for watchers that do more."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def on_message(self, text: str) -> None:
        self._watcher.on_message(text)

    def on_start(self, stage: str, subject: str) -> None:
        self._watcher.on_start(stage, subject)

    def on_progress(self, stage: str, subject: str, count: int, total: int, unit: str) -> None:
        self._watcher.on_progress(stage, subject, count, total, unit)

    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        self._watcher.on_description(stage, subject, say)

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        self._watcher.on_end(stage, subject, status, seconds, summary)


class RecordedProgress(RelayedProgress):
    """``Watcher`` that records the ends of stages and forwards everything to another one."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(watcher)
        self.stages: list[StageEnd] = []  # In the order in which the stages ended.

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        self.stages.append(StageEnd(stage, subject, status, seconds, summary))
        super().on_end(stage, subject, status, seconds, summary)


def relay_progress(stages: Iterable[StageEnd]) -> None:
    """Report stages that ended in another process to the watcher of this one."""
    if (watcher := _watcher.get()) is not None:
        for end in stages:
            watcher.on_start(end.stage, end.subject)
            watcher.on_end(*end)


@contextmanager
def join_progress(stage: str, subject: str, sizes: Sequence[int]) -> Iterator[StageReport]:
    """Report all calls of ``stage`` inside the block as one call, and yield its report for the summary.

    The work in the remaining calls is estimated from ``sizes``, the number of documents of each call. The status is
    ``made`` if any call built its artifact. Calls of other stages inside the block are not reported.
    """
    with report_stage(stage, subject) as report:
        parts = _JointProgress(stage, sizes)
        with progress_watcher(parts):
            yield report
        report.status = "made" if parts.has_built else "cached"


class _JointProgress:
    """``Watcher`` of several calls that reports their joint progress, which is a count, to the outer watcher."""

    def __init__(self, stage: str, sizes: Sequence[int]) -> None:
        self._stage = stage
        self._remaining_sizes = list(sizes)  # Sizes of the running call and those after it.
        self._completed_before = 0  # Units of work in the calls that have ended.
        self._total = 0  # Units of work in the running call.
        self._outer_context = copy_context()
        self.has_built = False

    def on_message(self, text: str) -> None: ...
    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None: ...

    def on_start(self, stage: str, subject: str) -> None:
        self._total = 0

    def on_progress(self, stage: str, subject: str, count: int, total: int, unit: str) -> None:
        if stage != self._stage:
            return
        self._total = total
        remaining = round(total * sum(self._remaining_sizes[1:]) / self._remaining_sizes[0])
        before = self._completed_before
        self._outer_context.run(advance, before + count, before + total + remaining, unit)

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        if stage != self._stage:
            return
        del self._remaining_sizes[0]
        if status != "cached":
            self.has_built = True
            self._completed_before += self._total


class ProgressLog:
    """``Watcher`` for runs without a terminal. It logs the end of each stage, and the progress of long stages."""

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> None:
        self._log = log
        self._pulse = Pulse(log.info)

    def on_message(self, text: str) -> None:
        self._log.info(text)

    def on_start(self, stage: str, subject: str) -> None:
        """Log nothing, because Prefect logs the start."""
        self._pulse.on_start(stage, subject)

    def on_progress(self, stage: str, subject: str, count: int, total: int, unit: str) -> None:
        self._pulse.on_progress(stage, subject, count, total, unit)

    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        self._pulse.on_description(stage, subject, say)

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        self._pulse.on_end(stage, subject)
        label = " ".join(part for part in (stage, subject) if part)
        self._log.info("%s %s: %s (%s)", _MARKS[status], label, summary, format_duration(seconds))


EVERY = 30.0  # Seconds between two log lines about one stage.
_LOG_WIDTH = 160  # Maximum characters of a log line.


@dataclass
class Pace:
    """Progress of one call of a stage. Times are in seconds on a monotonic clock."""

    began: float
    first_report: tuple[float, int] | None = None  # Time and count, so that the speed excludes loading.
    completed: int = 0
    total: int = 0
    unit: str = ""  # 'B', 'tokens' or 'requests'.
    words: Callable[[int], str] | None = None  # Returns the stage's own text, in at most that many characters.

    def on_progress(self, count: int, total: int, unit: str, now: float) -> None:
        """Record that ``count`` of ``total`` units are done."""
        self.completed, self.total, self.unit = count, total, unit
        self.first_report = self.first_report or (now, count)

    def text(self, now: float, *, bar: bool) -> str:
        """Return a line such as ``412 of 1,319 requests · 35/s · 26 s left``, or an empty string before any progress.

        With ``bar``, a number of bytes is shown as a bar.
        """
        if not self.total:
            return ""
        first_time, first_count = self.first_report or (self.began, 0)
        rate = (self.completed - first_count) / max(now - first_time, 1e-3)
        if self.unit == "B" and bar:
            share = self.completed / self.total
            parts = ["━" * round(20 * share) + "╌" * (20 - round(20 * share)) + f" {100 * share:.0f} %"]
        elif self.unit == "B":
            parts = [f"{format_bytes(self.completed)} of {format_bytes(self.total)}"]
        else:
            parts = [f"{self.completed:,} of {self.total:,} {self.unit}"]
        if rate > 0:
            speed = f"{rate / 1e6:.0f} MB" if self.unit == "B" else f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
            parts.append(f"{speed}/s")
            if self.completed < self.total:
                seconds = (self.total - self.completed) / rate
                parts.append(f"{max(1, round(seconds))} s left" if seconds < 60 else f"{format_duration(seconds)} left")
        return " · ".join(parts)


class Pulse:
    """Log of the progress of stage calls, with a line per call every 30 seconds and none for shorter calls."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._calls: dict[tuple[str, str], tuple[Pace, float]] = {}  # With the time of the last log line.

    def on_start(self, stage: str, subject: str) -> None:
        """Record that a call has started."""
        now = self._clock()
        self._calls[stage, subject] = (Pace(now), now)

    def on_progress(self, stage: str, subject: str, count: int, total: int, unit: str) -> None:
        """Record the progress of a call, and log it if the last line is 30 seconds old."""
        if (call := self._calls.get((stage, subject))) is not None:
            pace, _ = call
            pace.on_progress(count, total, unit, self._clock())
            self._log_if_due(stage, subject, lambda now: pace.text(now, bar=False))

    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        """Log the call's own text if the last line is 30 seconds old."""
        if (stage, subject) in self._calls:
            self._log_if_due(stage, subject, lambda _: say(_LOG_WIDTH))

    def on_end(self, stage: str, subject: str) -> None:
        """Record that a call has ended."""
        self._calls.pop((stage, subject), None)

    def _log_if_due(self, stage: str, subject: str, line: Callable[[float], str]) -> None:
        now, (pace, last) = self._clock(), self._calls[stage, subject]
        if now - last >= EVERY:
            self._calls[stage, subject] = (pace, now)
            self._say(f"{' '.join(filter(None, (stage, subject)))}: {line(now)}")

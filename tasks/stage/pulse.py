"""Format the progress of a stage as a line with count, speed and remaining time, and log it every 30 seconds.

::

    evaluate merge on copy: 412 of 1,319 requests · 35/s · 26 s left
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mergegate.merge_core.wording import format_bytes, format_duration

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

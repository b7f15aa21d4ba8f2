"""How far a stage is, in one line: what is done, how fast it goes, how long that will take; and when a log hears of it.

::

    evaluate merge on copy: 412 of 1,319 requests · 35/s · 26 s left
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mergegate.merge_core.wording import format_bytes, format_duration

EVERY = 30.0  # seconds between two lines of a log about one stage
_WIDE = 160  # characters of a line that no terminal bounds


@dataclass
class Pace:
    """How far one call of a stage has come. Times are seconds of a clock that never jumps."""

    began: float
    moved: tuple[float, int] | None = None  # when it first told how far it was, and how far: loading is no speed
    done: int = 0
    total: int = 0
    unit: str = ""  # 'B', 'tokens', 'requests'
    words: Callable[[int], str] | None = None  # what it says of itself, in so many characters

    def advanced(self, done: int, total: int, unit: str, now: float) -> None:
        """Take note that ``done`` of ``total`` are done."""
        self.done, self.total, self.unit = done, total, unit
        self.moved = self.moved or (now, done)

    def text(self, now: float, *, bar: bool) -> str:
        """``412 of 1,319 requests · 35/s · 26 s left``; empty before anything was told.

        Args:
            bar: Whether bytes are drawn, or else said.
        """
        if not self.total:
            return ""
        since, before = self.moved or (self.began, 0)
        rate = (self.done - before) / max(now - since, 1e-3)
        if self.unit == "B" and bar:
            share = self.done / self.total
            parts = ["━" * round(20 * share) + "╌" * (20 - round(20 * share)) + f" {100 * share:.0f} %"]
        elif self.unit == "B":
            parts = [f"{format_bytes(self.done)} of {format_bytes(self.total)}"]
        else:
            parts = [f"{self.done:,} of {self.total:,} {self.unit}"]
        if rate > 0:
            speed = f"{rate / 1e6:.0f} MB" if self.unit == "B" else f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
            parts.append(f"{speed}/s")
            if self.done < self.total:
                parts.append(f"{_about((self.total - self.done) / rate)} left")
        return " · ".join(parts)


class Pulse:
    """Tells a log how far stages are: of each call at most a line every half minute, and none of a short one."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._calls: dict[tuple[str, str], tuple[Pace, float]] = {}  # and when a line was due last

    def started(self, stage: str, subject: str) -> None:
        """A call begins."""
        now = self._clock()
        self._calls[stage, subject] = (Pace(now), now)

    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None:
        """It has come so far."""
        if (known := self._calls.get((stage, subject))) is not None:
            pace, _ = known
            pace.advanced(done, total, unit, self._clock())
            self._perhaps(stage, subject, lambda now: pace.text(now, bar=False))

    def described(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        """It says so of itself."""
        if (stage, subject) in self._calls:
            self._perhaps(stage, subject, lambda _: say(_WIDE))

    def ended(self, stage: str, subject: str) -> None:
        """Nothing more will be said of it."""
        self._calls.pop((stage, subject), None)

    def _perhaps(self, stage: str, subject: str, line: Callable[[float], str]) -> None:
        now, (pace, last) = self._clock(), self._calls[stage, subject]
        if now - last >= EVERY:
            self._calls[stage, subject] = (pace, now)
            self._say(f"{' '.join(filter(None, (stage, subject)))}: {line(now)}")


def _about(seconds: float) -> str:
    """A guess says no tenths of a second."""
    return f"{max(1, round(seconds))} s" if seconds < 60 else format_duration(seconds)

"""The lines a person watches: one a stage, in place while it works, with what it found and how long it took.

On a terminal the lines live; elsewhere (a log, CI) each is printed once, when its stage has ended::

    demo · ties of 2 over base                                         profile profiles/demo.yaml
      ✓ licences      mit, apache-2.0 → apache-2.0                                          0.2 s
      = evaluate      cached: base, reverser · merge: copy 100.0 · reverse 99.3             3.1 s
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from merge_core.units import format_duration
from tasks.stage import StageStatus, watched_by

_MARKS: dict[StageStatus, tuple[str, str, str]] = {  # mark, mark where the terminal knows only ASCII, style
    "made": ("✓", "+", "green"),
    "cached": ("=", "=", "cyan"),
    "rebuilt": ("✓", "+", "green"),
    "refused": ("✗", "x", "bold red"),
    "failed": ("✗", "x", "bold red"),
}
_BRIEF = 12  # characters that one of several subjects may take
_MARGIN = 3 + 13 + 4  # columns of a row that are not for its text and its time: mark, name, what is between
_SEVERITY: tuple[StageStatus, ...] = ("cached", "made", "rebuilt", "refused", "failed")


@dataclass
class _Call:
    """One call of a stage, on one subject."""

    subject: str
    began: float
    moved: tuple[float, int] | None = None  # when it first told how far it was, and how far: loading is no speed
    done: int = 0
    total: int = 0
    unit: str = ""
    words: Callable[[int], str] | None = None  # what it says of itself, in so many characters
    status: StageStatus | None = None
    seconds: float = 0.0
    summary: str = ""


@dataclass
class _Line:
    """All calls of one stage."""

    stage: str
    calls: list[_Call] = field(default_factory=list)

    @property
    def status(self) -> StageStatus | None:
        statuses = [call.status for call in self.calls]
        return None if None in statuses else max((one for one in statuses if one), key=_SEVERITY.index)

    @property
    def seconds(self) -> float:
        return sum(call.seconds if call.status else time.monotonic() - call.began for call in self.calls)

    def text(self, width: int) -> str:
        """What to say: the summary of a single call; of several, what was cached and what each new one found. What a
        running stage says of itself fits into ``width`` characters."""
        running = [call for call in self.calls if call.status is None]
        if running and running[-1].words is not None:
            return running[-1].words(width)
        if running:
            return _how_far(running[-1], time.monotonic())
        if not any(call.subject for call in self.calls):
            return self.calls[-1].summary
        fresh = dict.fromkeys(call.subject for call in self.calls if call.status != "cached")
        cached = dict.fromkeys(call.subject for call in self.calls if call.subject not in fresh)
        said = {name: ", ".join(call.summary for call in self.calls if call.subject == name) for name in fresh}
        if any(len(text) > _BRIEF for text in said.values()):  # then only the last, the merge, is worth the room
            *others, last = said
            parts = [", ".join(others)] * bool(others) + [f"{last}: {said[last]}"]
        else:
            parts = [f"{name} {text}" for name, text in said.items()]
        return " · ".join([f"cached: {', '.join(cached)}"] * bool(cached) + parts)


class TerminalProgress:
    """A ``Watcher`` that draws on a rich console. Use as a context manager around the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ascii = not (console.encoding or "").lower().startswith("utf")
        self._above: list[RenderableType] = []  # What came before the last announcement.
        self._lines: dict[str, _Line] = {}
        self._printed: set[str] = set()
        self._live: Live | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Draw every stage that runs inside."""
        with watched_by(self):
            if not self._console.is_terminal:
                try:
                    yield
                finally:
                    self._print_ended()
                return
            with Live(console=self._console, refresh_per_second=8, get_renderable=self._draw) as self._live:
                yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to somebody who is asked something."""
        self._print_ended()
        if self._live is not None:
            self._live.stop()
        try:
            yield
        finally:
            if self._live is not None:
                self._live.start()

    def headline(self, left: str, right: str) -> None:
        """The line above all stages."""
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(Text(left, style="bold"), Text(right, style="dim"))
        self._console.print(grid)

    def announced(self, text: str) -> None:
        self._print_ended()
        self._above += [*(self._row(line) for line in self._lines.values()), Text(f"  {text}", style="bold")]
        if not self._console.is_terminal:
            self._console.print(self._above[-1])
        self._lines, self._printed = {}, set()

    def started(self, stage: str, subject: str) -> None:
        if stage not in self._lines:
            self._print_ended()
        self._lines.setdefault(stage, _Line(stage)).calls.append(_Call(subject, time.monotonic()))

    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None:
        call = self._running(stage, subject)
        call.done, call.total, call.unit = done, total, unit
        call.moved = call.moved or (time.monotonic(), done)

    def described(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        self._running(stage, subject).words = say

    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        call = self._running(stage, subject)
        call.status, call.seconds, call.summary = status, seconds, summary

    def _running(self, stage: str, subject: str) -> _Call:
        """The call that is meant: stages may run side by side, each subject on its own."""
        calls = self._lines[stage].calls
        return next((one for one in reversed(calls) if one.subject == subject and one.status is None), calls[-1])

    def _print_ended(self) -> None:
        if self._console.is_terminal:
            return
        for line in self._lines.values():
            if line.stage not in self._printed and line.status:
                self._printed.add(line.stage)
                self._console.print(self._row(line))

    def _draw(self) -> RenderableType:
        return Group(*self._above, *(self._row(line) for line in self._lines.values()))

    def _row(self, line: _Line) -> RenderableType:
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(width=3, justify="right")
        grid.add_column(width=13, no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        mark: RenderableType
        if line.status is None:
            mark, style = Spinner("line" if self._ascii else "dots", style="yellow"), "yellow"
        else:
            glyph, plain, style = _MARKS[line.status]
            mark = Text(plain if self._ascii else glyph, style=style)
        took = format_duration(line.seconds)
        room = self._console.width - _MARGIN - len(took)
        text_style = style if line.status in ("refused", "failed") else ""
        grid.add_row(mark, Text(line.stage), Text(line.text(max(room, 1)), style=text_style), Text(took, "dim"))
        return grid


def _how_far(call: _Call, now: float) -> str:
    """``base 412 of 1,319 requests · 35/s · 26 s left``; of bytes a bar and a speed."""
    if not call.total:
        return call.subject
    since, before = call.moved or (call.began, 0)
    rate = (call.done - before) / max(now - since, 1e-3)
    if call.unit == "B":
        share = call.done / call.total
        parts = ["━" * round(20 * share) + "╌" * (20 - round(20 * share)) + f" {100 * share:.0f} %"]
    else:
        parts = [f"{call.done:,} of {call.total:,} {call.unit}"]
    if rate > 0:
        speed = f"{rate / 1e6:.0f} MB" if call.unit == "B" else f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
        parts.append(f"{speed}/s")
        if call.done < call.total:
            parts.append(f"{_about((call.total - call.done) / rate)} left")
    return f"{call.subject} {' · '.join(parts)}".strip()


def _about(seconds: float) -> str:
    """A guess says no tenths of a second."""
    return f"{max(1, round(seconds))} s" if seconds < 60 else format_duration(seconds)

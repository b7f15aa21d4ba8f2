"""Draw the progress of a run: one line per stage with its result and duration.

On a terminal, the lines update in place. Elsewhere (a log, CI, a terminal without cursor movement), each line is
printed once when its stage ends, and long stages report their progress on standard error now and then. With ``-v``,
lines are printed once everywhere, and details appear below the name of each stage. Stage, result and time have the same
columns everywhere, and a long result continues below itself::

    demo · ties of 2 over base                            profile profiles/demo.yaml
      ✓ licenses    mit, apache-2.0 → apache-2.0                               0.2 s
      = evaluate    cached: base, reverser · merge: copy 100.0, reverse 99.3,  3.1 s
                    shift 99.8

``mergegate run --events`` prints one line of JSON on standard output for each event instead::

    {"event": "started", "time": 1763863200.1, "stage": "evaluate", "subject": "base"}
    {"event": "advanced", "time": …, "stage": "evaluate", "subject": "base", "done": 40, "total": 400, "unit": "…"}
    {"event": "ended", "time": …, "stage": "evaluate", "subject": "base", "status": "made", "seconds": 3, "summary": ""}
    {"event": "announced", "time": …, "text": "remedy 1: density: 0.3"}
    {"event": "finished", "time": …, "status": "released", "message": "…", "findings": [], …}

The last line has the keys of ``--json``. docs/reference/machine-interface.md describes all of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from mergegate.flows.operations.console import wrap_line
from mergegate.merge_core.errors import escape_invisible
from mergegate.merge_core.wording import detail_listener, format_duration
from mergegate.tasks.base.stage import Pace, Pulse, StageEnd, StageStatus, joint_status, progress_watcher, running_stage

_MARKS: dict[StageStatus, tuple[str, str, str]] = {  # mark, mark on ASCII-only terminals, style
    "made": ("✓", "+", "green"),
    "cached": ("=", "=", "cyan"),
    "rebuilt": ("✓", "+", "green"),
    "refused": ("✗", "x", "bold red"),
    "failed": ("✗", "x", "bold red"),
}
_BRIEF = 12  # characters of a result, if the line shows the results of several subjects
_WIDEST = 100  # columns; on a wide terminal, a time far from its text is hard to match with its line
_NAME = 11  # columns of a stage's name
_MARGIN = 3 + _NAME + 4  # columns of a row in addition to its text and time: mark, name and gaps


@dataclass
class _Call:
    """One call of a stage, on one subject."""

    subject: str
    pace: Pace
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
        ended = [(call.subject, call.status) for call in self.calls if call.status]
        return joint_status(ended) if len(ended) == len(self.calls) else None

    @property
    def seconds(self) -> float:
        return sum(call.seconds if call.status else time.monotonic() - call.pace.began for call in self.calls)

    def text(self, width: int) -> str:
        """Return the text of the line: the summary of a single call, or cached subjects and the result of each new one.

        A running stage is described in ``width`` characters.
        """
        running = [call for call in self.calls if call.status is None]
        if running and (words := running[-1].pace.words) is not None:
            return words(width)
        if running:
            return f"{running[-1].subject} {running[-1].pace.text(time.monotonic(), bar=True)}".strip()
        if not any(call.subject for call in self.calls):
            return self.calls[-1].summary
        fresh = dict.fromkeys(call.subject for call in self.calls if call.status != "cached")
        cached = dict.fromkeys(call.subject for call in self.calls if call.subject not in fresh)
        summaries = {name: ", ".join(call.summary for call in self.calls if call.subject == name) for name in fresh}
        if any(len(text) > _BRIEF for text in summaries.values()):  # only the last one, the merge, is worth the space
            *others, last = summaries
            parts = [", ".join(others)] * bool(others) + [f"{last}: {summaries[last]}"]
        else:
            parts = [f"{name} {text}" for name, text in summaries.items()]
        return " · ".join([f"cached: {', '.join(cached)}"] * bool(cached) + parts)


class TerminalProgress:
    """A ``Watcher`` that draws the stages of a run on a rich console while the block of ``watching`` runs.

    With ``verbose``, it also prints details, such as cache keys and subprocesses (``merge_core.wording``).
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console, self._verbose = console, verbose
        # Whether lines can be redrawn. A terminal without cursor movement gets each line once.
        self._is_live = (console.is_terminal or console.is_jupyter) and not (
            console.is_dumb_terminal or console.quiet or verbose
        )
        self._ascii = not (console.encoding or "").lower().startswith("utf")
        self._above: list[RenderableType] = []  # lines before the last announcement
        self._lines: dict[str, _Line] = {}
        self._printed: set[str] = set()
        self._live: Live | None = None
        self._pulse = Pulse(_to_standard_error, lambda: time.monotonic())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Draw every stage that runs in the block."""
        with progress_watcher(self), detail_listener(self._detailed) if self._verbose else nullcontext():
            if not self._is_live:
                try:
                    yield
                finally:
                    self._print_ended()
                return
            with Live(console=self._console, refresh_per_second=8, get_renderable=self._draw) as self._live:
                yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop drawing while the block prompts the user."""
        self._print_ended()
        if self._live is not None:
            self._live.stop()
        try:
            yield
        finally:
            if self._live is not None:
                self._live.start()

    def headline(self, title: str, remark: str) -> None:
        """Print the line above all stages, or two lines if the terminal is too narrow."""
        width = self._width
        if cell_len(title) + 2 + cell_len(remark) > width:
            self._console.print(Text(title, style="bold"))
            self._console.print(Text(f"  {remark}", style="dim"))
            return
        gap = " " * (width - cell_len(title) - cell_len(remark))
        self._console.print(Text.assemble((title, "bold"), gap, (remark, "dim")))

    @property
    def _width(self) -> int:
        return min(self._console.width, _WIDEST)

    def on_message(self, text: str) -> None:
        self._print_ended()
        self._above += [*(self._row(line) for line in self._lines.values()), Text(f"  {text}", style="bold")]
        if not self._is_live:
            self._console.print(self._above[-1])
        self._lines, self._printed = {}, set()

    def on_start(self, stage: str, subject: str) -> None:
        if stage in self._printed and not subject:  # such as a gate that decides again: its new result needs a line
            self._printed.remove(stage)
            del self._lines[stage]
        if stage not in self._lines:
            self._print_ended()
            if self._verbose:
                self._console.print(Text(f"  {'-' if self._ascii else '·'} {stage}", style="bold"))
        self._lines.setdefault(stage, _Line(stage)).calls.append(_Call(subject, Pace(time.monotonic())))
        if not self._is_live:
            self._pulse.on_start(stage, subject)

    def on_progress(self, stage: str, subject: str, count: int, total: int, unit: str) -> None:
        self._running(stage, subject).pace.on_progress(count, total, unit, time.monotonic())
        self._pulse.on_progress(stage, subject, count, total, unit)

    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        self._running(stage, subject).pace.words = say
        self._pulse.on_description(stage, subject, say)

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        call = self._running(stage, subject)
        call.status, call.seconds, call.summary = status, seconds, summary
        self._pulse.on_end(stage, subject)

    def _detailed(self, line: str) -> None:
        """Print a detail below its stage."""
        line = line.replace(f"{Path.cwd()}/", "")
        if self._console.quiet:
            _to_standard_error(line)
        else:
            self._console.print(Text(f"      {line}", style="dim"))

    def _running(self, stage: str, subject: str) -> _Call:
        """Return the running call of a stage on ``subject``. Calls on several subjects may run in parallel."""
        calls = self._lines[stage].calls
        return next((call for call in reversed(calls) if call.subject == subject and call.status is None), calls[-1])

    def _print_ended(self) -> None:
        if self._is_live:
            return
        for line in self._lines.values():
            if line.stage not in self._printed and line.status:
                self._printed.add(line.stage)
                self._console.print(self._row(line), no_wrap=True)

    def _draw(self) -> RenderableType:
        return Group(*self._above, *(self._row(line) for line in self._lines.values()))

    def _row(self, line: _Line) -> RenderableType:
        took = format_duration(line.seconds)
        room = max(self._width - _MARGIN - len(took), 1)
        if line.status is None:
            grid = Table.grid(padding=(0, 1))
            grid.add_column(width=3, justify="right")
            grid.add_column(min_width=_NAME, no_wrap=True)
            grid.add_column(min_width=room + 1, no_wrap=True)
            grid.add_column(justify="right", no_wrap=True)
            spinner = Spinner("line" if self._ascii else "dots", style="yellow")
            grid.add_row(spinner, Text(line.stage), Text(fit_text(line.text(room), room)), Text(took, style="dim"))
            return grid
        glyph, plain, style = _MARKS[line.status]
        mark = plain if self._ascii else glyph
        text = Text(" ".join(line.text(room).split()), style if line.status in ("refused", "failed") else "")
        lines = wrap_line(text, room, hang=0)
        if self._is_live:  # a word that is wider than the terminal would disturb the cursor
            lines = [Text(fit_text(part.plain, room), text.style) for part in lines]
        first, *others = lines
        gap = " " * max(room - first.cell_len + 2, 1)
        row = Text.assemble("  ", (mark, style), f" {line.stage:<{_NAME}} ", first, gap, (took, "dim"))
        return Text("\n").join((row, *(Text(" " * (_NAME + 5)) + other for other in others)))


def _to_standard_error(line: str) -> None:
    """Print a line where logs show it, and where it does not break a JSON object on standard output."""
    with suppress(OSError, ValueError):  # standard error is closed
        print(f"  {escape_invisible(line)}", file=sys.stderr, flush=True)


def fit_text(text: str, width: int) -> str:
    """Shorten ``text`` to one line of ``width`` columns: the first parts that fit in full, or else the first words."""
    text = " ".join(text.split())
    if cell_len(text) <= width:
        return text
    for separator in (" · ", ", ", " "):
        parts, beginning = text.split(separator), ""
        for part in parts:
            longer = f"{beginning}{separator}{part}" if beginning else part
            if cell_len(f"{longer}{separator.rstrip()} …") > width:
                break
            beginning = longer
        if cell_len(beginning) >= width / 2:
            return f"{beginning}{separator.rstrip()} …"
    shortened = Text(text)
    shortened.truncate(width, overflow="ellipsis")
    return shortened.plain


def stage_lines(stages: Iterable[StageEnd]) -> Iterator[tuple[str, StageStatus, str, float]]:
    """Yield name, status, result and seconds of each stage. Calls of one stage on several subjects are one line."""
    lines: dict[str, _Line] = {}
    for end in stages:
        call = _Call(end.subject, Pace(0.0), end.status, end.seconds, end.summary)
        lines.setdefault(end.stage, _Line(end.stage)).calls.append(call)
    for line in lines.values():
        yield line.stage, line.status or "failed", line.text(_WIDEST), line.seconds


_SECONDS_BETWEEN = 1.0  # minimum time between two progress lines of one call


def print_event(event: str, **facts: object) -> None:
    """Print and flush one line. If the reader of the pipe has closed it, discard all further output."""
    try:
        print(json.dumps({"event": event, "time": round(time.time(), 3), **facts}, default=str), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class EventLines:
    """A ``Watcher`` that prints a line of JSON for each event."""

    def __init__(self) -> None:
        self._last_progress: dict[tuple[str, str], float] = {}

    @contextmanager
    def watching(self, *, verbose: bool = False) -> Iterator[None]:
        """Print an event for every stage that runs in the block.

        With ``verbose``, also print details, such as cache keys and subprocesses (``merge_core.wording``).
        """
        with progress_watcher(self), detail_listener(self.on_detail) if verbose else nullcontext():
            yield

    def on_detail(self, line: str) -> None:
        stage, subject, key = running_stage()
        print_event("detail", stage=stage, subject=subject, key=key, text=line)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do nothing, because events do not disturb a prompt."""
        yield

    def on_message(self, text: str) -> None:
        print_event("announced", text=text)

    def on_start(self, stage: str, subject: str) -> None:
        print_event("started", stage=stage, subject=subject)

    def on_progress(self, stage: str, subject: str, count: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - self._last_progress.get((stage, subject), 0.0) < _SECONDS_BETWEEN and count < total:
            return
        self._last_progress[stage, subject] = now
        print_event("advanced", stage=stage, subject=subject, done=count, total=total, unit=unit)

    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        """Ignore the description of a stage, because only terminals show it."""

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        print_event("ended", stage=stage, subject=subject, status=status, seconds=round(seconds, 3), summary=summary)

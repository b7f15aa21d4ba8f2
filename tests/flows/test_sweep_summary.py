"""The summary lines of a sweep, and its single progress line, on wide and narrow terminals."""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from mergegate.flows.cli.progress import TerminalProgress
from mergegate.flows.cli.run_summary import sweep_summary
from mergegate.tasks.report import search_line
from mergegate.tasks.report.sweep.content import SweepContent
from mergegate.tasks.stage import describe_progress, progress_watcher
from mergegate.tasks.stage.progress import report_stage
from mergegate.tasks.sweep import SearchProgress

sys.path.append(str(Path(__file__).parent.parent / "report"))
import sweep_samples as samples

MINUS = "\N{MINUS SIGN}"


def printed(content: SweepContent, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for piece in sweep_summary(content):
        console.print(piece)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [120, 80, 60, 44])
def test_a_narrow_terminal_shows_all_numbers(width: int) -> None:
    text = printed(samples.confirmed(), width)
    for number in (f"{MINUS}0.0072", f"{MINUS}0.0831", f"{MINUS}0.0053", "+0.0002"):
        assert number in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_the_verdict_is_the_line_after_the_tables() -> None:
    lines = [line.strip() for line in printed(samples.unconfirmed(), 100).splitlines()]
    assert "nightly-sweep: no candidate confirmed" in lines
    assert "This lead is not shown to be more than chance." in " ".join(lines)
    assert lines[-1] == "61 trials in 10.1 s · cost 0.0034"


def test_several_objectives_have_a_table_each() -> None:
    text = printed(samples.several(), 100)
    assert text.index("exact match of reverse, points") < text.index("exact match of shift, points")


def test_a_search_without_a_score_has_no_table() -> None:
    assert printed(samples.lonely(), 100).startswith("demo-sweep: no candidate confirmed\n")


@pytest.mark.parametrize("width", [120, 72, 50])
def test_the_progress_line_fits_the_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    shown = TerminalProgress(console)
    progress = SearchProgress(37, 60, generation=4, best=-0.00491, hand_written=-0.0072, seconds_left=41)
    with progress_watcher(shown), report_stage("search", ""):
        describe_progress(partial(search_line, progress))
        plain = Console(file=io.StringIO(), width=width)
        plain.print(shown._draw())
        lines = str(plain.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 1
    assert f"best {MINUS}0.0049" in lines[0]
    assert ("about 40 s left" in lines[0]) == (width >= 100)

"""The progress line of a running stage or sweep: how far it is, its rate, the time left; and the summary of a sweep."""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from mergegate.flows.operations import progress
from mergegate.flows.operations.progress import TerminalProgress
from mergegate.flows.operations.summary import sweep_summary
from mergegate.merge_core.wording import detail
from mergegate.tasks.base.stage import StageStatus, describe_progress, joint_status, progress_watcher, report_stage
from mergegate.tasks.release.report import search_line
from mergegate.tasks.release.report.sweep import SweepContent
from mergegate.tasks.sweep import SearchProgress

sys.path.append(str(Path(__file__).parent.parent / "report"))
import sweep_samples as samples

MINUS = "\N{MINUS SIGN}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def shown() -> TerminalProgress:
    return TerminalProgress(Console(file=io.StringIO(), width=120, force_terminal=True))


def line(shown: TerminalProgress, width: int = 120) -> str:
    """Return the text on the terminal."""
    console = Console(file=io.StringIO(), width=width)
    console.print(shown._draw())
    return str(console.file.getvalue()).strip()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("counts", "seconds", "unit", "words"),
    [
        ((62, 412, 1319), 10, "requests", "merge 412 of 1,319 requests · 35/s · 26 s left"),
        ((0, 25, 1000), 10, "requests", "25 of 1,000 requests · 2.5/s · 6 m 30 s left"),  # a slow rate has a decimal
        ((0, 5 * 10**8, 10**9), 2, "B", "━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌ 50 % · 250 MB/s · 2 s left"),
    ],
)
def test_progress_is_shown_with_its_rate_and_the_time_left(
    clock: SimpleNamespace, shown: TerminalProgress, counts: tuple[int, int, int], seconds: int, unit: str, words: str
) -> None:
    first, second, total = counts
    shown.on_start("evaluate", "merge")
    clock.now += 60  # The time to load the model does not count toward the rate.
    shown.on_progress("evaluate", "merge", first, total, unit)
    clock.now += seconds
    shown.on_progress("evaluate", "merge", second, total, unit)
    assert words in line(shown)


def test_nothing_is_promised_before_there_is_a_rate_or_when_all_is_done(
    clock: SimpleNamespace, shown: TerminalProgress
) -> None:
    shown.on_start("evaluate", "merge")
    assert line(shown).split()[1:3] == ["evaluate", "merge"]
    shown.on_progress("evaluate", "merge", 5, 10, "requests")
    clock.now += 1
    assert "5 of 10 requests" in line(shown)
    assert "/s" not in line(shown)
    shown.on_progress("evaluate", "merge", 10, 10, "requests")
    assert "10 of 10 requests · 5.0/s" in line(shown)
    assert "left" not in line(shown)


def test_a_stage_that_looks_twice_has_said_what_it_said_last(clock: SimpleNamespace, shown: TerminalProgress) -> None:
    for status, words in (("refused", "inconclusive after 100"), ("made", "3 tasks passed")):
        shown.on_start("gate", "")
        shown.on_end("gate", "", status, 0.1, words)  # type: ignore[arg-type]
    assert line(shown).split()[:4] == ["✓", "gate", "3", "tasks"]


@pytest.mark.parametrize(
    ("calls", "joint"),
    [
        ([("a", "cached"), ("b", "made"), ("b", "cached")], "made"),
        ([("a", "failed"), ("a", "made")], "made"),  # Retried.
        ([("a", "failed"), ("b", "made")], "failed"),
        ([("a", "made"), ("a", "refused")], "refused"),
        ([("a", "refused"), ("a", "refused")], "refused"),
    ],
)
def test_a_withdrawn_refusal_does_not_count(calls: list[tuple[str, StageStatus]], joint: StageStatus) -> None:
    assert joint_status(calls) == joint


def test_details_stand_below_the_name_of_their_stage_and_before_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), width=120)
    with TerminalProgress(console, verbose=True).watching(), report_stage("merge", "") as report:
        detail("store: merge 5f0c is not in the store")
        report.status, report.summary = "made", "564 kB"
    first, second, third = str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    assert first.split()[1:] == ["merge"]
    assert second == "      store: merge 5f0c is not in the store"
    assert third.split()[1:4] == ["merge", "564", "kB"]
    quiet = TerminalProgress(Console(quiet=True), verbose=True)
    with quiet.watching():
        detail("process 7")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "  process 7\n")


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


def test_the_verdict_is_the_line_after_the_tables_of_the_objectives() -> None:
    lines = [line.strip() for line in printed(samples.unconfirmed(), 100).splitlines()]
    assert "nightly-sweep: no candidate confirmed" in lines
    assert "This lead is not shown to be more than chance." in " ".join(lines)
    assert lines[-1] == "61 trials in 10.1 s · cost 0.0034"
    several = printed(samples.several(), 100)
    assert several.index("exact match of reverse, points") < several.index("exact match of shift, points")
    # A search without a score has no table.
    assert printed(samples.lonely(), 100).startswith("demo-sweep: no candidate confirmed\n")


@pytest.mark.parametrize(("error", "cause"), [(KeyboardInterrupt(), "interrupted"), (OSError("x"), "OSError")])
def test_a_failed_stage_always_has_a_reason(error: BaseException, cause: str) -> None:
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(type(error)), TerminalProgress(console).watching(), report_stage("gate", ""):
        raise error
    assert cause in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [120, 72, 50])
def test_the_progress_line_of_a_sweep_fits_the_terminal(width: int) -> None:
    shown = TerminalProgress(Console(file=io.StringIO(), width=width, force_terminal=True))
    progress = SearchProgress(37, 60, generation=4, best=-0.00491, hand_written=-0.0072, seconds_left=41)
    with progress_watcher(shown), report_stage("search", ""):
        describe_progress(partial(search_line, progress))
        (text,) = line(shown, width).splitlines()
    assert f"best {MINUS}0.0049" in text
    assert ("about 40 s left" in text) == (width >= 100)

"""The progress line of a running stage: how far it is, its rate, and the time left."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from mergegate.flows.cli import progress
from mergegate.flows.cli.progress import TerminalProgress
from mergegate.merge_core.wording import detail
from mergegate.tasks.stage import StageStatus, joint_status, report_stage


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def shown() -> TerminalProgress:
    return TerminalProgress(Console(file=io.StringIO(), width=120, force_terminal=True))


def line(shown: TerminalProgress) -> str:
    """Return the text on the terminal."""
    console = Console(file=io.StringIO(), width=120)
    console.print(shown._draw())
    return str(console.file.getvalue()).strip()  # type: ignore[attr-defined]


def test_requests_are_shown_with_their_rate_and_the_time_left(clock: Clock, shown: TerminalProgress) -> None:
    shown.on_start("evaluate", "merge")
    clock.now += 60  # The time to load the model does not count toward the rate.
    shown.on_progress("evaluate", "merge", 62, 1319, "requests")
    clock.now += 10
    shown.on_progress("evaluate", "merge", 412, 1319, "requests")
    assert "merge 412 of 1,319 requests · 35/s · 26 s left" in line(shown)


def test_long_waits_are_in_minutes_and_slow_rates_have_a_decimal(clock: Clock, shown: TerminalProgress) -> None:
    shown.on_start("evaluate", "merge")
    shown.on_progress("evaluate", "merge", 0, 1000, "requests")
    clock.now += 10
    shown.on_progress("evaluate", "merge", 25, 1000, "requests")
    assert "25 of 1,000 requests · 2.5/s · 6 m 30 s left" in line(shown)


def test_byte_counts_have_a_progress_bar(clock: Clock, shown: TerminalProgress) -> None:
    shown.on_start("merge", "")
    shown.on_progress("merge", "", 0, 10**9, "B")
    clock.now += 2
    shown.on_progress("merge", "", 5 * 10**8, 10**9, "B")
    assert "━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌ 50 % · 250 MB/s · 2 s left" in line(shown)


def test_nothing_is_promised_before_there_is_a_rate_or_when_all_is_done(clock: Clock, shown: TerminalProgress) -> None:
    shown.on_start("evaluate", "merge")
    assert line(shown).split()[1:3] == ["evaluate", "merge"]
    shown.on_progress("evaluate", "merge", 5, 10, "requests")
    clock.now += 1
    assert "5 of 10 requests" in line(shown)
    assert "/s" not in line(shown)
    shown.on_progress("evaluate", "merge", 10, 10, "requests")
    assert "10 of 10 requests · 5.0/s" in line(shown)
    assert "left" not in line(shown)


def test_a_stage_that_looks_twice_has_said_what_it_said_last(clock: Clock, shown: TerminalProgress) -> None:
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

"""The line of a stage that works: how far it is, how fast it goes, and how long that will take."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from flows.cli import progress
from flows.cli.progress import TerminalProgress


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
    """What the terminal shows now."""
    console = Console(file=io.StringIO(), width=120)
    console.print(shown._draw())
    return str(console.file.getvalue()).strip()  # type: ignore[attr-defined]


def test_requests_are_shown_with_their_rate_and_the_time_left(clock: Clock, shown: TerminalProgress) -> None:
    shown.started("evaluate", "merge")
    clock.now += 60  # loading the model says nothing about speed
    shown.advanced("evaluate", "merge", 62, 1319, "requests")
    clock.now += 10
    shown.advanced("evaluate", "merge", 412, 1319, "requests")
    assert "merge 412 of 1,319 requests · 35/s · 26 s left" in line(shown)


def test_a_long_wait_is_said_in_minutes_and_a_slow_rate_with_a_digit(clock: Clock, shown: TerminalProgress) -> None:
    shown.started("evaluate", "merge")
    shown.advanced("evaluate", "merge", 0, 1000, "requests")
    clock.now += 10
    shown.advanced("evaluate", "merge", 25, 1000, "requests")
    assert "25 of 1,000 requests · 2.5/s · 6 m 30 s left" in line(shown)


def test_bytes_have_a_bar(clock: Clock, shown: TerminalProgress) -> None:
    shown.started("merge", "")
    shown.advanced("merge", "", 0, 10**9, "B")
    clock.now += 2
    shown.advanced("merge", "", 5 * 10**8, 10**9, "B")
    assert "━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌ 50 % · 250 MB/s · 2 s left" in line(shown)


def test_nothing_is_promised_before_there_is_a_rate_or_when_all_is_done(clock: Clock, shown: TerminalProgress) -> None:
    shown.started("evaluate", "merge")
    assert line(shown).split()[1:3] == ["evaluate", "merge"]
    shown.advanced("evaluate", "merge", 5, 10, "requests")
    clock.now += 1
    assert "5 of 10 requests" in line(shown)
    assert "/s" not in line(shown)
    shown.advanced("evaluate", "merge", 10, 10, "requests")
    assert "10 of 10 requests · 5.0/s" in line(shown)
    assert "left" not in line(shown)

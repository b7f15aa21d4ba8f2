"""Budgets of the test suite: recorded processor seconds of each tier, and lines of ``tests/``.

``tests/durations.json`` contains the number of tests and their processor seconds, with those of their child processes,
for each file and tier. Processor time hardly depends on the load. A complete run writes the file again:
``RECORD_DURATIONS=1 make test-stories``. ``tests/budget.toml`` contains the limits. `test_budget.py` compares both with
the collected tests, so that the suite cannot grow without a line in ``budget.toml`` that gives the reason.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DURATIONS = HERE / "durations.json"
TIERS = ("test", "story", "proof")
COLLECTED = pytest.StashKey[Counter[tuple[str, str]]]()

Recorded = Mapping[str, Mapping[str, tuple[int, float]]]


def tier_of(item: pytest.Item) -> str:
    """Return the first tier that runs a test: ``test``, ``story`` or ``proof``."""
    return next((tier for tier in reversed(TIERS) if item.get_closest_marker(tier)), "test")


def file_of(node_id: str) -> str:
    """Return the file of a test, relative to ``tests/``."""
    return node_id.partition("::")[0].removeprefix("tests/")


def count(items: Iterable[pytest.Item]) -> Counter[tuple[str, str]]:
    """Return the number of tests by file and tier. Tests in environments of their own are not counted."""
    elsewhere = ("gpu", "peer", "fusionbench", "serve", "ray", "variants")
    here = (item for item in items if not any(item.get_closest_marker(mark) for mark in elsewhere))
    return Counter((file_of(item.nodeid), tier_of(item)) for item in here)


def expected_seconds(collected: Mapping[tuple[str, str], int], recorded: Recorded, tier: str) -> float:
    """Return the processor seconds that the collected tests of a tier are expected to take.

    A test of a known file takes as long as the mean of the recorded tests of this file and tier. A test of another file
    takes as long as the mean of all recorded tests of the tier.
    """
    total = [row[tier] for row in recorded.values() if tier in row]
    mean = sum(seconds for _, seconds in total) / max(1, sum(number for number, _ in total))
    expected = 0.0
    for (file, its_tier), number in collected.items():
        if its_tier == tier:
            known, seconds = recorded.get(file, {}).get(tier, (0, 0.0))
            expected += number * (seconds / known if known else mean)
    return expected


def lines_of_tests() -> int:
    """Return the number of lines of all Python files in ``tests/``."""
    return sum(len(path.read_text().splitlines()) for path in HERE.rglob("*.py"))


class Meter:
    """Pytest plugin that adds its processor seconds to each test, as the property ``seconds``."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._before = sum(os.times()[:4])
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        item.user_properties.append(("seconds", sum(os.times()[:4]) - self._before))


class Recorder:
    """Pytest plugin that records the processor seconds of a complete run in ``durations.json``."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            tier = next((tier for tier in reversed(TIERS) if tier in report.keywords), "test")
            row = self._rows[file_of(report.nodeid)]
            number, seconds = row.get(tier, (0, 0.0))
            row[tier] = (number + 1, seconds + dict(report.user_properties)["seconds"])

    def pytest_sessionfinish(self) -> None:
        lines = []
        for file, row in sorted(self._rows.items()):
            rounded = {tier: (number, round(seconds, 2)) for tier, (number, seconds) in sorted(row.items())}
            lines.append(f"{json.dumps(file)}: {json.dumps(rounded)}")
        DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")

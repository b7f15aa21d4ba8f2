"""Product and suite grow only with a reason: compare their sizes and expected seconds with ``tests/budget.toml``."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from operator import gt

import budget
import pytest

from tools.sizes import size_of_product

BUDGET = tomllib.loads((budget.HERE / "budget.toml").read_text())
RECORDED = json.loads(budget.DURATIONS.read_text())
HINT = "Make the tests cheaper, or raise the limit in tests/budget.toml with a line that gives the reason."


def test_the_lines_of_the_tests_are_within_the_budget() -> None:
    lines = budget.lines_of_tests()
    assert lines <= BUDGET["lines"]["limit"], f"tests/ has {lines} lines of {BUDGET['lines']['limit']}. {HINT}"


def test_the_size_of_each_package_is_within_the_budget() -> None:
    """The sizes are lines, files, classes and lines of imports."""
    limits, sizes = BUDGET["product"]["limits"], size_of_product()
    assert sizes.keys() == limits.keys()
    larger = {one: (size, limits[one]) for one, size in sizes.items() if any(map(gt, size, limits[one]))}
    assert larger == {}, "Simplify the package, or raise its limits in tests/budget.toml and give the reason."


@pytest.mark.parametrize("tier", ["test", "story"])
def test_the_expected_seconds_of_the_tests_are_within_the_budget(pytestconfig: pytest.Config, tier: str) -> None:
    limit = BUDGET["seconds"][tier]
    seconds = budget.expected_seconds(pytestconfig.stash[budget.COLLECTED], RECORDED, tier)
    assert seconds <= limit, f"tests of the tier {tier!r} are expected to take {seconds:.0f} s of {limit} s. {HINT}"


def test_every_limit_has_a_reason() -> None:
    assert all(section["reasons"] and all(section["reasons"]) for section in BUDGET.values())


def test_more_tests_are_expected_to_take_longer() -> None:
    recorded = {"a.py": {"test": (4, 2.0)}, "b.py": {"test": (1, 8.0), "story": (1, 30.0)}}
    collected = Counter({("a.py", "test"): 6, ("b.py", "story"): 1, ("new.py", "test"): 2})
    assert budget.expected_seconds(collected, recorded, "test") == 6 * 0.5 + 2 * 2.0
    assert budget.expected_seconds(collected, recorded, "story") == 30.0

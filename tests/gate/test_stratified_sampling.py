"""The tables of ``docs/benchmarks/stratified-sampling*.md`` and the estimate behind them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import load_benchmark

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
PAGES = [BENCHMARKS / name for name in ("stratified-sampling.md", "stratified-sampling-cases.md")]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_benchmark("stratified_sampling")  # type: ignore[no-any-return]


def table(name: str) -> list[list[str]]:
    """Return the cells of a table in the pages, without its two header lines."""
    text = (
        "".join(page.read_text(encoding="utf-8") for page in PAGES)
        .split(f"<!-- {name} -->\n")[1]
        .split(f"<!-- /{name} -->")[0]
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.mark.story
def test_the_stratified_drop_is_unbiased_however_the_answers_change(script: ModuleType) -> None:
    rng = np.random.default_rng(1)
    for name, merge in [*script.patterns(0.1, 0.03).items(), *script.adversaries(0.1, 0.03, rng)]:
        assert merge.drop == pytest.approx(0.03), name
        drops = script.sample(script.GUARD, merge, [script.allocate(300, 0.1)], 4000, rng)[0].at(0.95)
        assert drops.drop.mean() == pytest.approx(3, abs=5 * drops.drop.std() / 4000**0.5), name


def test_a_later_look_contains_the_documents_of_the_earlier_ones(script: ModuleType) -> None:
    sizes = [script.allocate(n, 0.05) for n in (250, 500, 1000, 2000)]
    assert all((after >= before).all() for before, after in pairwise(sizes))
    early, late = script.sample(
        script.GUARD, script.patterns(0.1, 0.0)["usual"], sizes[:2], 100, np.random.default_rng(2)
    )
    assert all((b.lost >= a.lost).all() for a, b in zip(early.strata, late.strata, strict=True))


@pytest.mark.parametrize("looks", [(300,), (250, 500, 1000)])
def test_a_merge_at_the_margin_is_published_in_at_most_5_percent(script: ModuleType, looks: tuple[int, ...]) -> None:
    rng, runs = np.random.default_rng(3), 4000
    for name, merge in script.patterns(0.1, 0.03).items():
        share = script.stratified(script.HARD, merge, (looks, 0.1), runs, rng).share
        assert share <= 0.05 + 4 * (0.05 * 0.95 / runs) ** 0.5, name


def test_the_pages_claim_no_more_than_their_tables_show(script: ModuleType) -> None:
    rows = table("single")
    assert [row[:2] for row in rows] == [[f"{d:.2f}", f"{n:,}"] for d in script.DISCORDANCES for n in script.DOCUMENTS]
    for name, runs in (("single", 20_000), ("looks", 15_000), ("suite", 4_000)):
        error = 100 * (0.05 * 0.95 / runs) ** 0.5
        for row in table(name):
            assert max(map(float, row[-6:-1])) <= 5 + 3 * error, (name, row)


def test_alarms_that_count_all_documents_alike_are_false_in_a_stratified_sample(script: ModuleType) -> None:
    rng, apart = np.random.default_rng(4), script.Merge(np.array([0.5, 0, 0, 0]), np.array([0, 0, 0, 1 / 15]))
    drops = script.sample(script.GUARD, apart, [script.allocate(250, 0.05)], 500, rng)[0]
    assert apart.drop == pytest.approx(0)
    assert script.plain_alarms(drops, 0.005 / 57).mean() > 0.05
    assert not (drops.at(1 - 0.005 / 57).low > 2).any()

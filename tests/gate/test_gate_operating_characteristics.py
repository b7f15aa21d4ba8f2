"""The gate's error rates in ``docs/benchmarks`` are true, and its tables match the scripts: plain and stratified."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import load_benchmark, script_fixture
from gate_samples import BENCHMARKS, verdict_of

from mergegate.tasks.evaluation.document_order import interim_looks
from mergegate.tasks.gate.settings import Guard

PAGE = BENCHMARKS / "gate-error-rates.md"
RUNS = 2000
ERROR = math.sqrt(0.05 * 0.95 / RUNS)  # standard error of a rate of 5%


script = script_fixture("operating_characteristics")


@pytest.mark.parametrize("first", [None, 200, 500])
@pytest.mark.parametrize("discordance", [0.05, 0.10, 0.20])
@pytest.mark.parametrize("n", [500, 1319])
def test_a_merge_at_the_margin_is_published_in_at_most_5_percent(
    script: ModuleType, n: int, discordance: float, first: int | None
) -> None:
    found = script.simulate(0.03, discordance, interim_looks(n, first), RUNS, np.random.default_rng(1))
    assert found.passed <= 0.05 + 3 * ERROR
    assert found.failed > 0.3


@pytest.mark.parametrize("first", [None, 200, 500])
@pytest.mark.parametrize("discordance", [0.05, 0.20])
def test_an_equal_merge_raises_an_alarm_in_at_most_5_percent(
    script: ModuleType, discordance: float, first: int | None
) -> None:
    found = script.simulate(0.0, discordance, interim_looks(1319, first), RUNS, np.random.default_rng(2))
    assert found.failed <= 0.05 + 3 * ERROR
    assert found.passed > 0.7


def test_interim_looks_save_most_documents_in_clear_cases(script: ModuleType) -> None:
    found = script.simulate(0.0, 0.10, interim_looks(14042, 500), RUNS, np.random.default_rng(3))
    assert found.passed > 0.99
    assert found.documents < 14042 / 5


@pytest.mark.story
@pytest.mark.parametrize("n", [500, 1000, 1319])
def test_the_script_decides_like_the_gate(script: ModuleType, n: int) -> None:
    schedule = interim_looks(1319, 500) if n in interim_looks(1319, 500)[:-1] else (n,)
    guard = Guard(task="reverse", guarded_by="reverser", max_drop=2, margin=3)
    counts = np.random.default_rng(4).multinomial(n, [0.055, 0.035, 0.91], size=60).astype(float)
    outcomes = []
    for lost, won, _ in counts:
        verdict = verdict_of(int(lost), int(won), n, guard, schedule=schedule)
        last = verdict.look.number == verdict.look.of
        passes, fails = script.decide(np.array(lost), np.array(won), n, verdict.look.confidence, last)
        outcomes.append("pass" if passes else "fail" if fails else "inconclusive")
        assert verdict.outcome == outcomes[-1]
    assert len(set(outcomes)) > 1


def shape(table: list[str]) -> list[tuple[int, str, str]]:
    """Return the number of cells and the words of the first two cells of each Markdown table row, ignoring numbers."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")]
    return [(len(row), row[0], row[1] if len(row) == 7 else "") for row in rows]


def test_the_tables_in_the_docs_match_the_script(script: ModuleType) -> None:
    rng = np.random.default_rng(5)
    made = [*script.characteristics(10, rng), *script.errors(10, rng)]
    document = PAGE.read_text(encoding="utf-8")
    kept = re.search(r"<!-- operating characteristics -->\n(.*)<!-- end -->", document, re.DOTALL)
    assert kept
    assert shape(kept[1].splitlines()) == shape(made)


@pytest.mark.story
@pytest.mark.parametrize("name", ["suites", "attempts"])
def test_the_tables_about_suites_and_attempts_match_the_script(name: str) -> None:
    page = PAGE.with_name("suite-and-anchor-error-rates.md").read_text(encoding="utf-8").splitlines()
    header, *rows = load_benchmark("gate_suites").TABLES[name](1, np.random.default_rng(6))
    first = page.index(header) + 1
    assert [row.split("|")[:2] for row in page[first : first + len(rows)]] == [row.split("|")[:2] for row in rows]
    assert not page[first + len(rows)].startswith("|")


def test_the_docs_claim_no_more_than_their_tables_show() -> None:
    document = PAGE.read_text(encoding="utf-8")
    rows = [
        [float(cell) for cell in line.strip("|").split("|")[1:]]
        for line in document.split("<!-- end -->")[0].splitlines()
        if line.startswith("| ") and line.count("|") == 10 and "pass 0.05" not in line and "--" not in line
    ]
    assert len(rows) == 5
    assert max(share for row in rows for share in row) <= 5.0 + 3 * 0.05  # the Monte Carlo error stated in the table


# --- Stratified samples


@pytest.fixture(scope="module")
def stratified() -> ModuleType:
    return load_benchmark("stratified_sampling")


def table(name: str) -> list[list[str]]:
    """Return the cells of a table in the pages, without its two header lines."""
    pages = [BENCHMARKS / name for name in ("stratified-sampling.md", "stratified-sampling-cases.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    text = text.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.mark.story
def test_the_stratified_drop_is_unbiased_however_the_answers_change(stratified: ModuleType) -> None:
    rng = np.random.default_rng(1)
    for name, merge in [*stratified.patterns(0.1, 0.03).items(), *stratified.adversaries(0.1, 0.03, rng)]:
        assert merge.drop == pytest.approx(0.03), name
        drops = stratified.sample(stratified.GUARD, merge, [stratified.allocate(300, 0.1)], 4000, rng)[0].at(0.95)
        assert drops.drop.mean() == pytest.approx(3, abs=5 * drops.drop.std() / 4000**0.5), name


def test_a_later_look_contains_the_documents_of_the_earlier_ones(stratified: ModuleType) -> None:
    sizes = [stratified.allocate(n, 0.05) for n in (250, 500, 1000, 2000)]
    assert all((after >= before).all() for before, after in pairwise(sizes))
    early, late = stratified.sample(
        stratified.GUARD, stratified.patterns(0.1, 0.0)["usual"], sizes[:2], 100, np.random.default_rng(2)
    )
    assert all((b.lost >= a.lost).all() for a, b in zip(early.strata, late.strata, strict=True))


@pytest.mark.parametrize("looks", [(300,), (250, 500, 1000)])
def test_a_stratified_sample_publishes_a_merge_at_the_margin_in_at_most_5_percent(
    stratified: ModuleType, looks: tuple[int, ...]
) -> None:
    rng, runs = np.random.default_rng(3), 4000
    for name, merge in stratified.patterns(0.1, 0.03).items():
        share = stratified.stratified(stratified.HARD, merge, (looks, 0.1), runs, rng).share
        assert share <= 0.05 + 4 * (0.05 * 0.95 / runs) ** 0.5, name


def test_the_pages_claim_no_more_than_their_tables_show(stratified: ModuleType) -> None:
    rows = table("single")
    assert [row[:2] for row in rows] == [
        [f"{d:.2f}", f"{n:,}"] for d in stratified.DISCORDANCES for n in stratified.DOCUMENTS
    ]
    for name, runs in (("single", 20_000), ("looks", 15_000), ("suite", 4_000)):
        error = 100 * (0.05 * 0.95 / runs) ** 0.5
        for row in table(name):
            assert max(map(float, row[-6:-1])) <= 5 + 3 * error, (name, row)


def test_alarms_that_count_all_documents_alike_are_false_in_a_stratified_sample(stratified: ModuleType) -> None:
    rng, apart = np.random.default_rng(4), stratified.Merge(np.array([0.5, 0, 0, 0]), np.array([0, 0, 0, 1 / 15]))
    drops = stratified.sample(stratified.GUARD, apart, [stratified.allocate(250, 0.05)], 500, rng)[0]
    assert apart.drop == pytest.approx(0)
    assert stratified.plain_alarms(drops, 0.005 / 57).mean() > 0.05
    assert not (drops.at(1 - 0.005 / 57).low > 2).any()

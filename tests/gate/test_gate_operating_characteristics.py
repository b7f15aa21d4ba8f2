"""The gate's error rates in ``dev/measurements`` are true, and its tables match the scripts."""

from __future__ import annotations

import math
import re
from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import load_benchmark, script_fixture
from gate_samples import MEASUREMENTS, table_in_docs, verdict_of

from mergegate.tasks.quality.evaluation.document_order import interim_looks
from mergegate.tasks.quality.gate.settings import Guard

PAGE = MEASUREMENTS / "gate-error-rates.md"
RUNS = 2000
ERROR = math.sqrt(0.05 * 0.95 / RUNS)  # standard error of a rate of 5%


script = script_fixture("operating_characteristics")


@pytest.mark.parametrize("first", [None, 200])
@pytest.mark.parametrize("discordance", [0.05, 0.20])
@pytest.mark.parametrize("n", [500, 1319])
def test_a_merge_at_the_margin_is_published_in_at_most_5_percent(
    script: ModuleType, n: int, discordance: float, first: int | None
) -> None:
    found = script.simulate(0.03, discordance, interim_looks(n, first), RUNS, np.random.default_rng(1))
    assert found.passed <= 0.05 + 3 * ERROR
    assert found.failed > 0.3


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


@pytest.mark.proof
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


GRADED = "graded-and-clustered-error-rates.md"


@pytest.mark.parametrize(
    ("page", "table", "columns", "position", "error"),
    [
        ("cut-off-answers.md", "cut-off answers", slice(4, 5), 0, 1.05),
        (GRADED, "clusters at the margin", slice(3, None), 0, 0.31),
        (GRADED, "graded scores at the margin", slice(2, None), 0, 0.46),
        ("references-at-chance.md", "no knowledge", slice(2, None), 1, 0.0),
        ("duplicate-documents.md", "duplicates", slice(2, 4), 0, 1.03),
        ("perplexity-error-rates.md", "perplexity at a limit", slice(1, None), 0, 1.46),
    ],
)
def test_wrong_merges_are_published_in_at_most_5_percent_in_every_table(
    page: str, table: str, columns: slice, position: int, error: float
) -> None:
    """``error`` is the Monte Carlo error in points. ``position`` is that of the gate's share among those in a cell."""
    _, *rows = table_in_docs(page, table)
    rows = [row for row in rows if not row[0].startswith("1 %")]  # 24 documents cannot show that 1 % of them break
    cells = [re.split(" [·/] ", cell)[position] for row in rows for cell in row[columns]]
    assert len(cells) > 5
    assert max(float(cell) for cell in cells if cell != "refused") <= 5 + error

"""The pages about the gate in ``docs/explanation`` and ``dev/statistics`` show the numbers that it computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mergegate.tasks.quality.evaluation.document_order import interim_looks
from mergegate.tasks.quality.gate.clusters import clustered_difference, critical_value, effective_clusters
from mergegate.tasks.quality.gate.earlier_runs import anchor_confidence
from mergegate.tasks.quality.gate.graded_scores import graded_difference
from mergegate.tasks.quality.gate.regression import decide_guard
from mergegate.tasks.quality.gate.sequential import plan_looks
from mergegate.tasks.quality.gate.settings import GateRule
from mergegate.tasks.quality.gate.statistics import Difference, binary_difference, normal_quantile, student_quantile
from mergegate.tasks.quality.gate.suite import TaskDrop, mean_drop

PROJECT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    """Return a page of the explanations or the statistics on one line, with plain minus signs."""
    files = (PROJECT / folder / f"{name}.md" for folder in ("docs/explanation", "dev/statistics"))
    text = next(file for file in files if file.exists()).read_text(encoding="utf-8")
    return " ".join(text.replace("\N{MINUS SIGN}", "-").split())


def interval(difference: Difference) -> str:
    """Return ``1.2 [-0.1, 2.6]``, in points."""
    drop, low, high = (round(100 * value, 1) + 0.0 for value in difference[:3])
    return f"{drop:.1f} [{low:.1f}, {high:.1f}]"


@pytest.mark.parametrize(
    ("lost", "won", "outcome"), [(40, 36, "pass"), (60, 30, "fail"), (116, 100, "inconclusive")], ids=str
)
def test_the_example_of_one_guard(lost: int, won: int, outcome: str) -> None:
    found = binary_difference(lost, won, 1319, 0.95)
    assert f"| {lost} | {won} | {interval(found)} | {outcome} |" in page("how-the-gate-decides")
    assert decide_guard(*(100 * value for value in found[:3]), 2, 3) == outcome


def test_the_first_example_of_one_guard() -> None:
    found = binary_difference(66, 50, 1319, 0.95)
    assert interval(found) == "1.2 [-0.1, 2.6]"
    assert "bounds of the true drop are -0.1 and 2.6 points" in page("how-the-gate-decides")
    lows = [100 * binary_difference(60, 16, 400, level).low for level in (0.95, 0.9875)]
    example = "lower bound {:.1f} at 95 % and {:.1f} at the corrected 98.75 %".format(*lows)
    assert example in page("how-the-gate-decides")


def test_the_example_of_interim_looks() -> None:
    looks = plan_looks(interim_looks(1319, 500), 0.95)
    for look in looks:
        row = (look.number, f"{look.documents:,}", f"{100 * look.confidence:.2f} %")
        quantile = f"{normal_quantile(look.confidence):.2f}"
        assert "| {} | {} | {} | {} |".format(*row, quantile) in page("interim-looks")
    levels = [f"{100 * look.confidence:.2f} %" for look in looks]
    sentence = "{} with 500 documents, {} with 1,000 and {} with 1,319.".format(*levels)
    assert sentence in page("gate-statistics")
    single, early = (100 * binary_difference(25, 22, 500, level).high for level in (0.95, 0.9928))
    assert f"A 95 % bound would be {single:.1f}" in page("interim-looks")
    assert f"At 99.28 %, the bound is {early:.1f}" in page("interim-looks")


def test_the_example_of_a_suite() -> None:
    counts = {"copy": (24, 20), "reverse": (31, 27), "shift": (22, 24), "sort": (30, 18)}
    drops = []
    for task, (lost, won) in counts.items():
        found = binary_difference(lost, won, 400, 0.95)
        drops.append(TaskDrop(task, 1.0, found.mean, found.low, found.high))
        assert f"| {task} | {lost} | {won} | {interval(found)} |" in page("suites-and-attempts")
    mean = Difference(*mean_drop(drops), 0.0)
    assert f"| **mean** | | | **{interval(mean)}** | **pass** |" in page("suites-and-attempts")


def test_the_errors_of_attempts_and_of_an_anchor() -> None:
    first, second = (f"{100 * GateRule().for_attempt(number, 4).confidence:.4g} %" for number in (1, 2))
    for name in ("suites-and-attempts", "gate-statistics"):
        assert f"decided at {first}, each remedy at {second}" in page(name)
    for refusals in range(4):
        error = f"{100 * (1 - anchor_confidence(0.95, refusals)):.2g}"
        confidence = f"{100 * anchor_confidence(0.95, refusals):.4g}"
        assert f"| {refusals} | {error} % | {confidence} % |" in page("scheduled-runs-and-anchors")
    levels = [f"{100 * anchor_confidence(0.95, refusals):.4g} %" for refusals in range(3)]
    sentence = "confidence is {} at first, {} after one refusal and {} after two".format(*levels)
    assert sentence in page("gate-statistics")


@pytest.mark.story
def test_the_example_of_graded_scores() -> None:
    rng, bounds = np.random.default_rng(0), []
    for _ in range(200):
        differences = np.full(200, -0.01)
        differences[rng.choice(200, 4, replace=False)] = 1.0
        bounds.append(100 * graded_difference(differences, 0.95).high)
    drop, error = differences.mean(), differences.std(ddof=1) / 200**0.5
    students = 100 * (drop + student_quantile(0.95, 199) * error)
    assert f"| Student's t | {100 * drop:.1f} | {students:.1f} | pass |" in page("graded-scores")
    assert f"| {100 * drop:.1f} | about {np.median(bounds):.0f} | inconclusive |" in page("graded-scores")
    assert [graded_difference(np.zeros(n), 0.95).high <= 0.03 for n in (104, 105)] == [False, True]
    assert "a margin of 3 points needs 105 documents" in page("gate-statistics")


@pytest.mark.story
def test_the_example_of_clusters() -> None:
    differences: list[float] = []
    for extra in (*(0,) * 14, 2, 2, 3, 3, 4, 6):
        differences += [1.0] * (2 + extra) + [-1.0] * 2 + [0.0] * (46 - extra)
    assert (differences.count(1.0), differences.count(-1.0), len(differences)) == (60, 40, 1000)
    subjects = [str(document // 50) for document in range(1000)]
    questions = binary_difference(60, 40, 1000, 0.95)
    text = page("clustered-documents")
    assert f"| `new questions` (default) | {interval(questions)} | pass |" in text
    assert f"| `new subjects` | {interval(clustered_difference(differences, subjects, questions, 0.95))} |" in text
    quantiles = critical_value((50,) * 20, 0.95), student_quantile(0.95, 19)
    assert "`q` is {:.1f} instead of Student's {:.1f}".format(*quantiles) in text
    assert "{:.1f} for 20 equal clusters, instead of Student's {:.1f}".format(*quantiles) in page("gate-statistics")
    assert f"one of 500 count as {effective_clusters((100,) * 10 + (500,)):.1f}" in text

"""The evidence from judged pairs matches exact fractions, keeps its properties, and has the promised error rate."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import load_benchmark
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.tasks.shadow import ShadowRule, evidence_of, evidence_path
from mergegate.tasks.shadow.verdict import decide_shadow

RULE = ShadowRule()
THRESHOLD = math.log(20)
SCORES = st.lists(st.sampled_from([1.0, 0.5, 0.0]), max_size=60)
DOCUMENT = Path(__file__).resolve().parents[2] / "dev" / "measurements" / "shadow-simulation.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_benchmark("shadow_simulation")


def wealth(scores: list[float], bound: Fraction, *, above: bool) -> Fraction:
    """Return the exact joint wealth of 32 bettors who start with 1 in total and bet on each pair in turn."""
    total = Fraction(0)
    for k in range(1, 33):
        room = bound if above else 1 - bound
        stake, one = Fraction(2 * k - 1, 64) / (2 * room), Fraction(1)
        for x in map(Fraction, scores):
            one *= 1 + stake * ((x - bound) if above else (bound - x))
        total += one
    return total / 32


@settings(max_examples=10)
@given(scores=SCORES, margin=st.integers(1, 49))
def test_the_evidence_is_the_mean_capital_of_32_bets(scores: list[float], margin: int) -> None:
    found = evidence_of(scores, ShadowRule(margin=margin))
    bound = Fraction(50 - margin, 100)
    assert found.log_e_promote == pytest.approx(math.log(wealth(scores, bound, above=True)), abs=1e-9)
    assert found.log_e_rollback == pytest.approx(math.log(wealth(scores, Fraction(1, 2), above=False)), abs=1e-9)


@pytest.mark.story
@settings(max_examples=20)
@given(
    scores=SCORES, shuffled=st.randoms(use_true_random=False), margins=st.tuples(st.floats(0.1, 49), st.floats(0.1, 49))
)
def test_evidence_ignores_the_order_of_pairs_and_grows_with_the_margin(
    scores: list[float], shuffled: object, margins: tuple[float, float]
) -> None:
    other = sorted(scores)
    shuffled.shuffle(other)  # type: ignore[attr-defined]
    assert evidence_of(scores, RULE) == evidence_of(other, RULE)
    narrow, wide = (evidence_of(scores, ShadowRule(margin=margin)) for margin in sorted(margins))
    assert narrow.log_e_promote <= wide.log_e_promote + 1e-12
    assert narrow.log_e_rollback == wide.log_e_rollback


@settings(max_examples=20)
@given(scores=st.lists(st.sampled_from([1.0, 0.5, 0.0]), min_size=1, max_size=400))
def test_the_interval_agrees_with_the_decision_and_is_symmetric(scores: list[float]) -> None:
    found, mirrored = evidence_of(scores, RULE), evidence_of([1 - x for x in scores], RULE)
    assert (found.low, found.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low), abs=1e-12)
    assert 0 <= found.low <= found.win_rate <= found.high <= 1
    if abs(found.log_e_promote - THRESHOLD) > 1e-6:
        assert (found.low >= RULE.bound) == (found.log_e_promote >= THRESHOLD)
    if abs(found.log_e_rollback - THRESHOLD) > 1e-6:
        assert (found.high <= 0.5) == (found.log_e_rollback >= THRESHOLD)


@settings(max_examples=20)
@given(scores=st.lists(st.sampled_from([1.0, 0.5]), max_size=150), hours=st.floats(0, 48))
def test_nothing_is_promoted_before_both_minima(scores: list[float], hours: float) -> None:
    found = decide_shadow(evidence_of(scores, RULE), hours, RULE)
    assert found.outcome != "roll back"
    if len(scores) < 100 or hours < 24:
        assert found.outcome == "wait"


def test_each_decision_states_its_numbers() -> None:
    def said(scores: list[float], hours: float) -> str:
        return ": ".join(decide_shadow(evidence_of(scores, RULE), hours, RULE))

    assert said([], 1) == "wait: no pair has been judged yet"
    assert said([1, 0.5, 0.5, 0] * 500, 30) == (
        "promote: the win rate over 2,000 pairs is 50.0 %; with 95 % confidence it is above 47.5 %, "
        "at most 3 points below 50 %"
    )
    assert said([1, 0.5, 0.5, 0] * 500, 23.99).endswith(
        "below 50 %, but the test has run for only 23.9 of at least 24 hours"
    )
    assert said([0] * 20, 0.2) == (
        "roll back: the win rate over 20 pairs is 0.0 %; with 95 % confidence it is below 33.2 %, "
        "so the parent's answers are better"
    )
    assert said([1, 0] * 20, 30) == (
        "wait: the win rate over 40 pairs is 50.0 % (interval 29.7 % to 70.3 %); promotion requires "
        "a lower end above 47.0 %. In addition, only 40 of at least 100 pairs are judged"
    )


def test_a_proven_loss_within_the_margin_is_rolled_back() -> None:
    close = evidence_of([1.0] * 4850 + [0.5] * 40_000 + [0.0] * 5850, RULE)
    assert min(close.log_e_promote, close.log_e_rollback) > THRESHOLD
    assert decide_shadow(close, 99, RULE).outcome == "roll back"


def test_a_million_pairs_are_fast_and_the_path_ends_at_the_evidence() -> None:
    many = [1.0, 0.5, 0.5, 0.0] * 250_000
    whole, drawn = evidence_of(many, RULE), evidence_path(many, RULE)
    assert drawn[-1] == whole
    assert len(drawn) <= 400
    assert all(a.pairs < b.pairs for a, b in pairwise(drawn))
    assert 0.4985 < whole.low < 0.5 < whole.high < 0.5015
    assert all(math.isfinite(number) for number in (whole.log_e_promote, whole.log_e_rollback))
    assert evidence_path([1, 0, 0.5], RULE) == tuple(evidence_of([1, 0, 0.5][:n], RULE) for n in (1, 2, 3))
    assert evidence_path([], RULE) == ()
    with pytest.raises(ValueError, match="1/2"):
        evidence_of([0.7], RULE)


@pytest.mark.story
def test_error_rates_hold_when_checked_after_every_pair(script: ModuleType) -> None:
    """A small version of the table, with 800 runs of 1,500 pairs.

    At a true error rate of 5 %, 95 % of such samples are below 6.4 %.
    """
    margin = script.simulate(0.6, 0.03, RULE, 800, 1_500)
    equal = script.simulate(0.6, 0.0, RULE, 800, 1_500)
    assert 0 < (margin.promoted_at < script.NEVER).mean() <= 0.064
    assert 0 < (equal.rolled_back_at < script.NEVER).mean() <= 0.064
    assert margin.naive.mean() > 0.15, "a test made for one look errs more often"
    assert (equal.promoted | equal.rolled_back).mean() > 0.8
    assert (margin.promoted_at >= RULE.minimum_pairs).all()


def test_documented_error_rates_match_the_tables() -> None:
    """Both tables come from ``benchmarks/shadow_simulation.py``, with errors of at most 5 % in each row."""
    text = DOCUMENT.read_text()
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    errors = [row for row in rows if re.fullmatch(r"[368]0 %", row[0]) and len(row) == 4]
    needed = [row for row in rows if re.fullmatch(r"[368]0 %", row[0]) and len(row) == 6]
    assert (len(errors), len(needed)) == (3, 12)
    assert all(float(row[column].split()[0]) <= 5 for row in errors for column in (1, 3))

"""Alpha is spent over looks and over refusals, and an undecided guard requests more documents for its next look."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from gate_samples import GUARD, gate_scores, measured, part, right_on, verdict_of
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sampled
from scipy import stats

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage import home as home_of
from mergegate.tasks.quality.evaluation.document_order import interim_looks
from mergegate.tasks.quality.gate.earlier_runs import anchor_confidence, count_refusals, record_refusal
from mergegate.tasks.quality.gate.regression import decide_guard, judge_guards
from mergegate.tasks.quality.gate.sequential import InterimLook, plan_looks
from mergegate.tasks.quality.gate.settings import Guard
from mergegate.tasks.quality.gate.stage import gate_verdict, undecided_tasks
from mergegate.tasks.quality.gate.statistics import binary_difference
from mergegate.tasks.quality.gate.verdicts import GuardVerdict

PLAN = (500, 1000, 1319)
MMLU = (500, 1000, 2000, 4000, 8000, 14042)


def never_crossed(schedule: tuple[int, ...], bounds: list[float]) -> float:
    """Return the probability that no z statistic crosses its bound."""
    shares = np.array(schedule[: len(bounds)], dtype=float)
    correlation = np.sqrt(np.minimum.outer(shares, shares) / np.maximum.outer(shares, shares))
    integral = stats.multivariate_normal(cov=correlation, allow_singular=True, abseps=1e-7, maxpts=2_000_000, seed=1)
    return float(integral.cdf(bounds))


def test_a_single_look_has_the_requested_confidence_and_equals_a_plain_test() -> None:
    assert plan_looks((1319,), 0.95) == (InterimLook(number=1, of=1, documents=1319, confidence=0.95),)
    assert judge_guards([measured(GUARD, 43, 0, 300, schedule=(300,))], 0.95) == (verdict_of(43, 0, 300),)


@pytest.mark.story
@pytest.mark.parametrize("schedule", sampled([(500, 1000), PLAN, MMLU, (100, 1000, 1001)], [PLAN], pytest.mark.proof))
@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_every_look_spends_its_part_of_the_error(schedule: tuple[int, ...], confidence: float) -> None:
    bounds = [stats.norm.ppf(look.confidence) for look in plan_looks(schedule, confidence)]
    for k, documents in enumerate(schedule, start=1):
        spent = (1 - confidence) * (documents / schedule[-1]) ** 2
        assert 1 - never_crossed(schedule, bounds[:k]) == pytest.approx(spent, abs=2e-5)


def test_simulated_errors_match_the_bounds() -> None:
    steps = np.diff((0, *MMLU))
    walk = np.cumsum(np.random.default_rng(1).normal(size=(200_000, 6)) * np.sqrt(steps), axis=1)
    plan = plan_looks(MMLU, 0.95)
    bounds = np.array([stats.norm.ppf(look.confidence) * math.sqrt(look.documents) for look in plan])
    assert np.mean((walk > bounds).any(axis=1)) == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 200_000))


@given(st.integers(2, 20_000), st.integers(1, 20_000), st.floats(0.6, 0.999))
@settings(max_examples=20)
def test_every_look_has_at_least_the_joint_confidence(total: int, first: int, confidence: float) -> None:
    plan = plan_looks(interim_looks(total, first), confidence)
    assert all(confidence - 1e-9 <= look.confidence <= 1 for look in plan)
    assert sum(1 - look.confidence for look in plan) >= 1 - confidence - 1e-6  # not more conservative than necessary
    assert [look.number for look in plan] == list(range(1, len(plan) + 1))
    assert {look.of for look in plan} == {len(plan)}


def test_a_look_at_few_documents_has_a_confidence_below_1() -> None:
    assert 0.999999 < plan_looks((1, 10**9), 0.95)[0].confidence < 1


@pytest.mark.parametrize("schedule", [(), (0, 5), (5, 5), (10, 5)])
def test_a_schedule_must_increase(schedule: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must increase"):
        plan_looks(schedule, 0.95)


# --- Guards at their looks


def at_look(lost: int, won: int, n: int, guard: Guard = GUARD) -> GuardVerdict:
    return verdict_of(lost, won, n, guard, schedule=PLAN)


def test_the_interval_has_the_confidence_of_the_look() -> None:
    verdict = at_look(30, 10, 500)
    assert verdict.look == plan_looks(PLAN, 0.95)[0]
    assert verdict.confidence == 0.95  # joint confidence of all looks
    wanted = binary_difference(30, 10, 500, verdict.look.confidence)
    assert (verdict.low, verdict.high) == pytest.approx((100 * wanted.low, 100 * wanted.high))
    assert verdict.detectable_drop > verdict_of(30, 10, 500).detectable_drop


def test_an_early_look_can_be_inconclusive_where_a_single_look_passes() -> None:
    assert verdict_of(34, 34, 500).outcome == "pass"
    early = at_look(34, 34, 500)
    assert (early.outcome, early.documents_left) == ("inconclusive", 819)
    more = "500 of 1,319 documents of this run are used. About 1,000 documents would decide"
    assert early.reason.endswith(f"; the margin is 4. {more}")


def test_a_broken_skill_fails_at_the_first_look() -> None:
    verdict = at_look(100, 2, 500)
    assert (verdict.outcome, verdict.look.number if verdict.look else 0) == ("fail", 1)
    assert verdict.reason.endswith("; max_drop is 3, after 500 of 1,319 documents")


def test_the_last_look_has_no_documents_left() -> None:
    verdict = at_look(10, 10, 1319)
    assert (verdict.outcome, verdict.documents_left) == ("pass", 0)
    assert "after" not in verdict.reason


@pytest.mark.parametrize(("drop", "outcome"), [(3.5, "inconclusive"), (4.5, "fail")])
def test_an_early_look_fails_only_above_the_margin(drop: float, outcome: str) -> None:
    assert decide_guard(drop, 0.5, 6.0, 3.0, 4.0, last_look=False) == outcome
    assert decide_guard(drop, 0.5, 6.0, 3.0, 4.0, last_look=True) == "fail"


def test_documents_needed_can_exceed_those_of_the_task() -> None:
    verdict = at_look(140, 112, 1319, GUARD.model_copy(update={"max_drop": 2.5}))
    assert verdict.outcome == "inconclusive"
    assert verdict.documents_needed > 1319


def test_undecided_tasks_are_listed_once_and_only_while_documents_are_left_and_no_guard_failed() -> None:
    again, other = (GUARD.model_copy(update=change) for change in ({"guarded_by": "shifter"}, {"task": "copy"}))
    for verdicts, tasks in (
        ([at_look(34, 34, 500), at_look(34, 33, 500, again), at_look(0, 0, 500)], ("reverse",)),
        ([at_look(100, 2, 500), at_look(34, 34, 500, other)], ()),
        ([verdict_of(1, 1, 40)], ()),
    ):
        assert undecided_tasks(gate_verdict(verdicts, None, "block")) == tasks


def test_the_stage_finds_the_look_by_the_number_of_documents(tmp_path: Path) -> None:
    found = {
        name: [part(tmp_path / f"{name}{at}", right_on(range(1319), at + 500, at)) for at in (0, 500)]
        for name in ("reverser", "merge")
    }
    verdict = gate_scores(found, schedule={"reverse": PLAN})
    assert verdict.guards[0].look == plan_looks(PLAN, 0.95)[1]
    with pytest.raises(InvalidInput, match="1,000 evaluated documents") as caught:
        gate_scores(found, schedule={"reverse": (500, 1319)})
    assert "500, 1,319" in caught.value.expected


# --- An anchor that serves many runs remembers its refusals, which make the next pass harder

ANCHOR, OTHER = "a" * 64, "b" * 64


def test_all_refusals_together_spend_one_error() -> None:
    spent = [1 - anchor_confidence(0.95, refusals) for refusals in range(1000)]
    assert sum(spent) == pytest.approx(0.05, rel=2e-3)
    assert sum(spent) < 0.05
    assert spent == sorted(spent, reverse=True)


@pytest.mark.usefixtures("home")
def test_a_merge_counts_once_and_not_for_itself() -> None:
    for merge in ("m1", "m2", "m1"):
        record_refusal(ANCHOR, merge)
    assert count_refusals(ANCHOR) == 2
    assert count_refusals(ANCHOR, except_merge="m1") == 1
    assert count_refusals(OTHER) == 0


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"{", b"[1, null]", b'{"a": 1}', b"null"])
def test_a_damaged_record_counts_as_missing(garbage: bytes) -> None:
    record_refusal(ANCHOR, "m1")
    (record,) = (home_of() / "anchors").glob("*.json")
    record.write_bytes(garbage)
    assert count_refusals(ANCHOR) == 0
    record_refusal(ANCHOR, "m2")
    assert count_refusals(ANCHOR) == 1

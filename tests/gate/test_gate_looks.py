"""An undecided guard requests more documents, at confidence levels that hold jointly for all looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_samples import GUARD, paired, part, right_on, verdict_of

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.gate.evidence import GuardVerdict, measure_guard
from mergegate.tasks.gate.regression import decide_guard, judge_guards
from mergegate.tasks.gate.sequential import plan_looks
from mergegate.tasks.gate.settings import GateRule, Guard
from mergegate.tasks.gate.stage import GatePlan, gate, gate_verdict, undecided_tasks
from mergegate.tasks.gate.statistics import binary_difference

PLAN = (500, 1000, 1319)


def at_look(lost: int, won: int, n: int, guard: Guard = GUARD) -> GuardVerdict:
    measured = measure_guard(guard, "acc,none", paired(lost, won, n), True, schedule=PLAN)
    return judge_guards([measured], 0.95)[0]


def test_a_single_look_equals_a_plain_test() -> None:
    measured = measure_guard(GUARD, "acc,none", paired(43, 0, 300), True, schedule=(300,))
    assert judge_guards([measured], 0.95) == (verdict_of(43, 0, 300),)


def test_the_interval_has_the_confidence_of_the_look() -> None:
    verdict = at_look(30, 10, 500)
    assert verdict.look == plan_looks(PLAN, 0.95)[0]
    assert verdict.confidence == 0.95  # joint confidence of all looks
    wanted = binary_difference(30, 10, 500, verdict.look.confidence)
    assert (verdict.low, verdict.high) == pytest.approx((100 * wanted.low, 100 * wanted.high))


def test_an_early_look_can_be_inconclusive_where_a_single_look_passes() -> None:
    assert verdict_of(34, 34, 500).outcome == "pass"
    early = at_look(34, 34, 500)
    assert (early.outcome, early.documents_left) == ("inconclusive", 819)
    assert early.reason.endswith(
        "; the margin is 4. 500 of 1,319 documents of this run are used. About 1,000 documents would decide"
    )


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
    assert verdict.documents_needed is not None
    assert verdict.documents_needed > 1319


def test_the_detectable_drop_is_that_of_the_look() -> None:
    early, only = at_look(30, 10, 500), verdict_of(30, 10, 500)
    assert early.detectable_drop is not None
    assert only.detectable_drop is not None
    assert early.detectable_drop > only.detectable_drop


def test_undecided_tasks_are_listed_once() -> None:
    again = GUARD.model_copy(update={"guarded_by": "shifter"})
    verdict = gate_verdict([at_look(34, 34, 500), at_look(34, 33, 500, again), at_look(0, 0, 500)], None, "block")
    assert undecided_tasks(verdict) == ("reverse",)


def test_a_failure_leaves_no_undecided_tasks() -> None:
    other = GUARD.model_copy(update={"task": "copy"})
    assert undecided_tasks(gate_verdict([at_look(100, 2, 500), at_look(34, 34, 500, other)], None, "block")) == ()


def test_a_task_without_documents_left_is_not_extended() -> None:
    assert undecided_tasks(gate_verdict([verdict_of(1, 1, 40)], None, "block")) == ()


def test_the_stage_finds_the_look_by_the_number_of_documents(tmp_path: Path) -> None:
    found = {
        name: [part(tmp_path / f"{name}{at}", right_on(range(1319), at + 500, at)) for at in (0, 500)]
        for name in ("reverser", "merge")
    }
    verdict = gate.work((GUARD,), found, {}, None, GatePlan(GateRule(), schedule={"reverse": PLAN}))
    assert verdict.guards[0].look == plan_looks(PLAN, 0.95)[1]
    with pytest.raises(InvalidInput, match="1,000 evaluated documents"):
        gate.work((GUARD,), found, {}, None, GatePlan(GateRule(), schedule={"reverse": (500, 1319)}))

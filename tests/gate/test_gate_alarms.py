"""Alarms are corrected for the number of guards. Passing needs no correction, because every guard must pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gate_samples import GUARD, paired
from samples import sampled
from scipy import stats
from statsmodels.stats.multitest import multipletests

from mergegate.tasks.gate.evidence import GuardEvidence, ReferenceChoice, measure_guard
from mergegate.tasks.gate.regression import alarm_confidences, judge_guards


def measured(lost: int, won: int, n: int, task: str = "reverse", candidates: int = 1) -> GuardEvidence:
    guard = GUARD.model_copy(update={"task": task})
    return measure_guard(guard, "acc,none", paired(lost, won, n), True, choice=ReferenceChoice("base", candidates))


def p_value(lost: int, won: int, n: int) -> float:
    """Return the p-value of no drop: the larger of McNemar's and a Wald test's with one more change each way."""
    p_lost, p_won = (lost + 1) / (n + 2), (won + 1) / (n + 2)
    wald = (p_lost - p_won) / math.sqrt((p_lost + p_won - (p_lost - p_won) ** 2) / (n + 2))
    return float(stats.norm.sf(min(wald, (lost - won) / math.sqrt(lost + won))))


def test_a_single_guard_is_tested_at_the_confidence_of_the_profile() -> None:
    assert alarm_confidences([measured(30, 10, 500)], 0.95) == [0.95]


@pytest.mark.proof
def test_alarms_follow_holms_procedure() -> None:
    rng = np.random.default_rng(21)
    differing = 0
    for _ in range(20):
        counts = [(int(rng.integers(20, 45)), int(rng.integers(15, 30)), 500) for _ in range(4)]
        wanted = multipletests([p_value(*count) for count in counts], alpha=0.05, method="holm")[0]
        guards = [measured(*count) for count in counts]
        levels = alarm_confidences(guards, 0.95)
        found = [guard.interval(level).low > 0 for guard, level in zip(guards, levels, strict=True)]
        assert found == wanted.tolist()
        differing += sum(p_value(*count) < 0.05 for count in counts) != sum(found)
    assert differing > 2  # otherwise the test could not detect a missing correction


def test_one_alarm_makes_the_next_one_easier() -> None:
    clear, close = measured(90, 10, 500, "copy"), measured(48, 32, 500)
    alone = alarm_confidences([measured(20, 20, 500, "copy"), close], 0.95)
    beside = alarm_confidences([clear, close], 0.95)
    assert (alone[1], beside[1]) == (pytest.approx(0.975), 0.95)
    assert judge_guards([clear, close], 0.95)[1].outcome == "fail"


def test_a_drop_that_may_be_chance_among_many_guards_is_inconclusive() -> None:
    close = measured(39, 22, 500)
    assert judge_guards([close], 0.95)[0].outcome == "fail"
    among = judge_guards([close, *(measured(20, 20, 500, f"other {i}") for i in range(4))], 0.95)[0]
    assert among.outcome == "inconclusive"
    assert among.low > 0
    assert "One of 5 comparisons may deviate by chance" in among.reason


def test_passing_does_not_depend_on_the_number_of_guards() -> None:
    one = measured(5, 5, 500)
    assert judge_guards([one], 0.95)[0].outcome == "pass"
    assert judge_guards([one, *(measured(30, 30, 500, f"other {i}") for i in range(9))], 0.95)[0].outcome == "pass"


def test_the_best_of_several_parents_counts_as_one_question_per_parent() -> None:
    assert alarm_confidences([measured(30, 20, 500, candidates=3)], 0.95) == [pytest.approx(1 - 0.05 / 3)]


@pytest.mark.story
@pytest.mark.parametrize("guards", sampled([5, 12], [5]))
def test_an_equal_merge_raises_no_more_alarms_on_many_tasks_than_on_one(guards: int) -> None:
    rng = np.random.default_rng(22)
    strict = GUARD.model_copy(update={"max_drop": 0.0})  # every significant drop is an alarm
    alarmed = uncorrected = 0
    runs = 300
    for _ in range(runs):
        some = []
        for _ in range(guards):
            lost, won = (int(count) for count in rng.multinomial(300, [0.05, 0.05, 0.9])[:2])
            some.append(measure_guard(strict, "acc,none", paired(lost, won, 300), True))
        alarmed += any(verdict.outcome == "fail" for verdict in judge_guards(some, 0.95))
        uncorrected += any(one.interval(0.95).low > 0 for one in some)
    assert alarmed / runs <= 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5
    assert uncorrected / runs > 0.15

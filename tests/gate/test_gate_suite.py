"""A suite is judged by its tasks' mean drop: the interval of the mean, and which merges pass or fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gate_samples import gate_scores, measured, outcome, part
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.gate.evidence import GuardEvidence
from mergegate.tasks.quality.gate.references import comparable_parents, with_anchor
from mergegate.tasks.quality.gate.regression import decide_task, judge_guards
from mergegate.tasks.quality.gate.sequential import look_levels
from mergegate.tasks.quality.gate.settings import ANCHOR, CHAMPION, EvaluateSettings, GateRule, Guard
from mergegate.tasks.quality.gate.stage import undecided_tasks
from mergegate.tasks.quality.gate.statistics import binary_difference
from mergegate.tasks.quality.gate.suite import TaskDrop, judge_suite, mean_drop, pooled_drops, reference_findings
from mergegate.tasks.quality.gate.verdicts import GateVerdict


def evidence(
    task: str, lost: int, won: int, n: int, *, schedule: tuple[int, ...] = (), **settings: object
) -> GuardEvidence:
    guard = Guard(task=task, guarded_by="base", **{"max_drop": 2, **settings})  # type: ignore[arg-type]  # test settings
    return measured(guard, lost, won, n, schedule=schedule)


def seven(lost: int, won: int, n: int = 500) -> list[GuardEvidence]:
    return [evidence(f"task{i}", lost, won, n) for i in range(7)]


# --- The mean and its interval


def test_the_interval_of_the_mean_combines_those_of_the_tasks() -> None:
    measured = [evidence("a", 30, 20, 500), evidence("b", 9, 12, 164), evidence("c", 80, 75, 1319)]
    each = [binary_difference(lost, won, n, 0.95) for lost, won, n in ((30, 20, 500), (9, 12, 164), (80, 75, 1319))]
    verdict = judge_suite(measured, 0.95)
    drop = 100 * sum(one.mean for one in each) / 3
    assert verdict.drop == pytest.approx(drop)
    assert verdict.high == pytest.approx(drop + 100 / 3 * sum((one.high - one.mean) ** 2 for one in each) ** 0.5)
    assert verdict.low == pytest.approx(drop - 100 / 3 * sum((one.mean - one.low) ** 2 for one in each) ** 0.5)


def test_weights_change_the_mean_and_its_limits() -> None:
    light, heavy = evidence("a", 10, 0, 500), evidence("b", 0, 0, 500, weight=3.0, max_drop=4, margin=6)
    verdict = judge_suite([light, heavy], 0.95)
    assert verdict.drop == pytest.approx(0.25 * 2.0)
    assert (verdict.max_drop, verdict.margin) == (0.25 * 2 + 0.75 * 4, 0.25 * 3 + 0.75 * 6)


@pytest.mark.parametrize(
    ("rule", "guards", "warns"),
    [
        ("suite", "a champion, a x, b x", True),
        ("each", "a champion, a x, b x", False),
        ("suite", "a champion, b x", False),
        ("suite", "a champion, a anchor, b champion", False),
        ("suite", "a champion, a x", False),  # a single task is decided by each guard
    ],
)
def test_a_task_of_a_suite_with_several_references_is_a_warning(rule: str, guards: str, warns: bool) -> None:
    pairs = [text.split() for text in guards.split(", ")]
    built = [Guard(task=task, guarded_by=reference, max_drop=2) for task, reference in pairs]
    assert [finding.remedy for finding in reference_findings(built, rule)] == ["set rule: each"] * warns
    advisory = [guard.model_copy(update={"advisory": guard.guarded_by == "champion"}) for guard in built]
    assert not list(reference_findings(advisory, rule))


def test_a_gain_over_one_reference_can_hide_a_loss_against_another_in_the_mean() -> None:
    hidden = [evidence("a", 25, 0, 500), evidence("a", 0, 150, 500), evidence("b", 0, 0, 500)]
    assert judge_suite(hidden, 0.95).outcome == "pass"
    assert judge_suite([hidden[0], hidden[2]], 0.95).outcome != "pass"


def test_two_guards_of_a_task_count_once_and_share_its_documents() -> None:
    both = judge_suite([evidence("a", 30, 20, 500), evidence("a", 30, 20, 500), evidence("b", 5, 5, 500)], 0.95)
    once = judge_suite([evidence("a", 30, 20, 500), evidence("b", 5, 5, 500)], 0.95)
    assert (both.tasks, both.documents) == (2, 1000)
    assert (both.drop, both.low, both.high) == pytest.approx((once.drop, once.low, once.high))


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(121, 900)), min_size=1, max_size=6))
def test_the_mean_is_between_the_tasks_with_a_narrower_interval(counts: list[tuple[int, int, int]]) -> None:
    measured = [evidence(f"t{i}", *one) for i, one in enumerate(counts)]
    each, verdict = judge_guards(measured, 0.95), judge_suite(measured, 0.95)
    assert min(one.drop for one in each) - 1e-9 <= verdict.drop <= max(one.drop for one in each) + 1e-9
    assert verdict.high - verdict.drop <= max(one.high - one.drop for one in each) + 1e-9
    assert verdict.drop - verdict.low <= max(one.drop - one.low for one in each) + 1e-9


def test_a_batch_has_the_same_mean_as_single_samples() -> None:
    rng = np.random.default_rng(3)
    parts = [[TaskDrop(f"t{t}", 1.0 + t, d, d - 1, d + 2) for t, d in enumerate(rng.normal(size=3))] for _ in range(5)]
    arrays = [
        TaskDrop(f"t{t}", 1.0 + t, *(np.array([one[t][field] for one in parts]) for field in (2, 3, 4)))
        for t in range(3)
    ]
    together = np.array(mean_drop(arrays)).T
    assert together == pytest.approx(np.array([mean_drop(one) for one in parts]))


# --- What passes and what fails


def test_an_equal_merge_passes_although_no_single_task_suffices() -> None:
    measured = seven(50, 50)  # discordance .20: the bound of a single task is at 3.3 points
    assert {one.outcome for one in judge_guards(measured, 0.95)} == {"inconclusive"}
    assert judge_suite(measured, 0.95).outcome == "pass"
    assert {one.outcome for one in judge_guards(measured, 0.95, as_suite=True)} == {"pass"}


def test_small_losses_everywhere_add_up_and_fail() -> None:
    measured = seven(40, 25)  # 3 points each: no single task provably exceeds its limit
    assert "fail" not in {one.outcome for one in judge_guards(measured, 0.95, as_suite=True)}
    assert judge_suite(measured, 0.95).outcome == "fail"


def test_one_lost_skill_is_not_hidden_by_the_others() -> None:
    measured = [*seven(20, 20)[:6], evidence("lost", 60, 10, 500)]  # 10 points
    assert judge_suite(measured, 0.95).outcome != "fail"
    fallen = judge_guards(measured, 0.95, as_suite=True)[-1]
    assert fallen.outcome == "fail"
    assert fallen.reason.endswith("max_drop is 2")


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(-1, 9.9, "pass"), (1.9, 10, "pass"), (1.9, 10.1, "inconclusive"), (2.1, 5, "fail")]
)
def test_a_task_of_a_suite_fails_if_its_lower_bound_exceeds_max_drop(low: float, high: float, expected: str) -> None:
    assert decide_task(low, high, 2, 10) == expected


@pytest.mark.parametrize(
    ("lost", "won", "outcome", "ending"),
    [
        (0, 0, "pass", "the mean margin is 3"),
        (30, 22, "pass", "the mean margin is 3"),
        (70, 5, "fail", "max_drop is 2"),
    ],
)
def test_the_reason_ends_with_the_limit_that_decides(lost: int, won: int, outcome: str, ending: str) -> None:
    verdict = judge_suite(seven(lost, won, 1000), 0.95)
    assert (verdict.outcome, verdict.word) == (outcome, outcome)
    assert verdict.reason.endswith(ending)


def test_only_noisy_tasks_shrink_toward_the_mean() -> None:
    counts = (("noisy", 5, 1, 60), ("b", 60, 60, 3000), ("c", 45, 105, 3000))
    noisy, *others = pooled_drops([evidence(*each) for each in counts])
    assert abs(noisy.pooled) < 0.5 * abs(noisy.drop)
    assert all(abs(one.pooled - one.drop) < 0.3 for one in others)
    # Tasks that differ only by noise shrink to one number.
    drops = pooled_drops([evidence("a", 26, 25, 500), evidence("b", 25, 25, 500), evidence("c", 24, 25, 500)])
    assert len({round(one.pooled, 9) for one in drops}) == 1


# --- Looks


def test_a_suite_spends_its_error_by_the_information_in_the_mean() -> None:
    schedule = {"a": (500, 1000), "b": (100,)}
    at = [evidence("a", 5, 5, 500, schedule=schedule["a"]), evidence("b", 1, 1, 100, schedule=schedule["b"])]
    share = (1 / 1000 + 1 / 100) / (1 / 500 + 1 / 100)
    assert judge_suite(at, 0.95).look.confidence == pytest.approx(look_levels((share, 1.0), 0.95)[0])
    last_look = judge_suite([evidence("a", 5, 5, 1000, schedule=schedule["a"]), at[1]], 0.95).look
    assert (last_look.number, last_look.of) == (2, 2)


def test_tasks_at_different_looks_are_rejected() -> None:
    apart = [evidence("a", 5, 5, 500, schedule=(500, 1000)), evidence("b", 5, 5, 1000, schedule=(500, 1000))]
    with pytest.raises(InvalidInput, match="tasks at different looks: a 500, b 1,000"):
        judge_suite(apart, 0.95)


def right_on(task: str, wrong: int, n: int, first: int = 0) -> list[DocumentScore]:
    return [outcome(doc, float(doc >= wrong))._replace(task=task) for doc in range(first, n)]


def judged(
    tmp_path: Path, wrong: dict[str, dict[str, int]], guards: tuple[Guard, ...], n: int = 300, **plan: object
) -> GateVerdict:
    """Return the verdict on models that get these numbers of ``n`` documents of each task wrong."""
    scores = {
        model: [part(tmp_path / model / task, right_on(task, count, n)) for task, count in tasks.items()]
        for model, tasks in wrong.items()
    }
    return gate_scores(scores, *guards, **plan)


TASKS = ("copy", "reverse")


def guards_by(name: str) -> tuple[Guard, ...]:
    return tuple(Guard(task=task, guarded_by=name, max_drop=3) for task in TASKS)


def test_the_stage_judges_a_suite_by_default(tmp_path: Path) -> None:
    wrong = {"base": dict.fromkeys(TASKS, 0), "merge": {"copy": 0, "reverse": 8}}  # 2.7 points worse on one task
    together = judged(tmp_path / "suite", wrong, guards_by("base"))
    assert (together.outcome, [suite.tasks for suite in together.suites]) == ("pass", [2])
    assert together.overall_drop == pytest.approx(4 / 3)
    apart = judged(tmp_path / "each", wrong, guards_by("base"), rule=GateRule(rule="each"))
    assert (apart.outcome, apart.suites) == ("inconclusive", ())


def test_a_single_task_is_judged_by_its_own_margin(tmp_path: Path) -> None:
    wrong = {"base": {"reverse": 0}, "merge": {"reverse": 8}}
    alone = judged(tmp_path, wrong, guards_by("base")[1:])
    assert (alone.outcome, alone.suites, alone.guards[0].limit) == ("inconclusive", (), None)


def test_a_suite_is_extended_as_a_whole(tmp_path: Path) -> None:
    wrong = {"base": dict.fromkeys(TASKS, 0), "merge": {"copy": 0, "reverse": 7}}
    verdict = judged(tmp_path, wrong, guards_by("base"), 100, schedule=dict.fromkeys(TASKS, (100, 200, 300)))
    assert verdict.outcome == "inconclusive"
    assert undecided_tasks(verdict) == TASKS


# --- Attempts, anchors, references


@pytest.mark.parametrize("attempts", range(1, 7))
def test_all_attempts_of_a_run_share_one_error(attempts: int) -> None:
    errors = [1 - GateRule().for_attempt(number, attempts).confidence for number in range(1, attempts + 1)]
    assert sum(errors) == pytest.approx(0.05)
    assert errors == sorted(errors, reverse=True)


def test_an_anchor_is_another_reference_for_champion_guards(tmp_path: Path) -> None:
    guards = with_anchor((*guards_by(CHAMPION), Guard(task="copy", guarded_by="base")), "first")
    assert [guard.task for guard in guards if guard.guarded_by == ANCHOR] == ["copy", "reverse"]
    counts = {CHAMPION: 26, ANCHOR: 0, "base": 0, "merge": 27}  # slightly worse than in the previous run
    wrong = {model: dict.fromkeys(TASKS, count) for model, count in counts.items()}
    assert judged(tmp_path / "night", wrong, guards_by(CHAMPION)).outcome == "pass"
    ratcheted = judged(tmp_path / "anchor", wrong, with_anchor(guards_by(CHAMPION), "first"))
    assert (ratcheted.outcome, [suite.reference for suite in ratcheted.suites]) == ("fail", [CHAMPION, ANCHOR])
    assert ratcheted.suites[0].outcome == "pass"


@pytest.mark.parametrize(
    ("guarded_by", "anchor", "message"),
    [("base", "first", "requires a guard"), (ANCHOR, None, "requires 'anchor: first'")],
)
def test_an_anchor_requires_its_guards_and_the_reverse(guarded_by: str, anchor: str | None, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvaluateSettings.model_validate({"tasks": [{"task": "gsm8k", "guarded_by": guarded_by}], "anchor": anchor})


PARENTS = ("base", "math", "code")


@pytest.mark.parametrize(
    ("reference", "expected"),
    [("fine-tunes", ("math", "code")), ("all", PARENTS), ("base", ("base",)), (("code", "math"), ("math", "code"))],
)
def test_the_best_parent_is_a_merged_model_by_default(
    reference: str | tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert comparable_parents(reference, PARENTS, {"math", "code"}, "evaluate.reference") == expected


def test_an_unknown_best_parent_reference_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(InvalidInput, match=r"(?s)evaluate.reference.*'maths'.*did you mean 'math'"):
        comparable_parents("maths", PARENTS, PARENTS, "evaluate.reference")


def test_a_base_that_was_not_merged_is_not_the_best_parent(tmp_path: Path) -> None:
    counts = {"base": 0, "math": 60, "code": 90, "merge": 60}
    wrong = {model: {"copy": count} for model, count in counts.items()}
    guard = (Guard(task="copy", guarded_by="best parent"),)
    assert judged(tmp_path / "merged", wrong, guard, parents=("math", "code")).outcome == "pass"
    assert judged(tmp_path / "all", wrong, guard).outcome == "fail"

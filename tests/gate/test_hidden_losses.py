"""Test alarms: they find losses that a mean drop hides, and equal merges hardly ever raise one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import script_fixture
from gate_samples import gate_scores, measured, outcome, part, table_in_docs, verdict_of
from hypothesis import given, settings
from hypothesis.strategies import floats, integers, lists, sampled_from, tuples
from numpy.typing import NDArray
from samples import sampled
from scipy.stats import binom

from mergegate.tasks.preflight.evidence import Evidence
from mergegate.tasks.preflight.power_forecast import forecast_undecidable, plan_interim_looks
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.document_order import interim_looks
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore, PairedScores
from mergegate.tasks.quality.evaluation.scoring.metrics import PROBABILITY
from mergegate.tasks.quality.gate import GatePlan, GateRule, Guard, GuardVerdict, cannot_pass, undecided_tasks
from mergegate.tasks.quality.gate.alarms import Part, error_ratio_bound, leaf_parts
from mergegate.tasks.quality.gate.evidence import GuardEvidence, measure_guard
from mergegate.tasks.quality.gate.regression import judge_guards
from mergegate.tasks.quality.gate.sequential import error_at_look, plan_looks

GROUP = Guard(task="leaderboard", guarded_by="base")
LEADERBOARD = {"ifeval": 541, "math": 1324, "gpqa": 1192, "musr": 756, "bbh": 5761, "mmlu_pro": 12032}


def group(sizes: Sequence[int], drops: Sequence[float], discordance: float, rng: np.random.Generator) -> PairedScores:
    """Return the documents of a group in random order. ``drops`` (of 1) are the true drops of its tasks."""
    documents, reference, merge = [], [], []
    for number, (size, drop) in enumerate(zip(sizes, drops, strict=True)):
        changed = max(discordance, abs(drop))
        draw, right = rng.random(size), rng.random(size) < 0.6
        lost, won = draw < (changed + drop) / 2, (draw >= (changed + drop) / 2) & (draw < changed)
        documents += [(f"task_{number}", doc) for doc in range(size)]
        reference += np.where(lost, 1.0, np.where(won, 0.0, right)).tolist()
        merge += np.where(lost, 0.0, np.where(won, 1.0, right)).tolist()
    order = rng.permutation(len(documents))
    return PairedScores(*(tuple(values[i] for i in order) for values in (documents, reference, merge)))


def first_documents(scores: PairedScores, count: int) -> PairedScores:
    return PairedScores(*(values[:count] for values in (scores.documents, scores.reference, scores.merge)))


def at_look(scores: PairedScores, documents: int, guard: Guard = GROUP) -> GuardVerdict:
    """Return the verdict at one look of the usual schedule."""
    schedule, seen = interim_looks(len(scores.documents), 500), first_documents(scores, documents)
    return judge_guards([measure_guard(guard, "acc,none", seen, True, schedule=schedule)], 0.95)[0]


def final(scores: PairedScores, guard: Guard = GROUP) -> GuardVerdict:
    return judge_guards([measure_guard(guard, "acc,none", scores, True)], 0.95)[0]


# --- Tasks of a group


def test_a_collapsed_task_of_the_leaderboard_fails_the_group() -> None:
    # IFEval falls from 78 to 26, all else is equal. The mean over 21,606 documents drops by 1.3 points.
    verdict = final(group([*LEADERBOARD.values()], [0.52, 0.0, 0.0, 0.0, 0.0, 0.0], 0.1, np.random.default_rng(0)))
    assert verdict.drop < verdict.max_drop
    assert (verdict.outcome, [finding.kind for finding in verdict.findings]) == ("fail", ["task of the group"])
    assert verdict.reason.startswith("leaderboard: task_0: drop of ")
    assert verdict.reason.endswith("exceeds max_drop 2")


def test_the_worst_tasks_are_named_and_the_others_counted() -> None:
    verdict = final(group([400] * 30, [0.3, 0.4, 0.5, 0.6, 0.5] + [-0.2] * 25, 0.2, np.random.default_rng(1)))
    assert verdict.reason.startswith("leaderboard: task_3: drop of ")
    assert verdict.reason.count("points [") == 2  # of the second and third task
    assert verdict.reason.endswith("and 2 other tasks")


def test_a_task_that_is_not_a_group_raises_no_alarm_of_a_task() -> None:
    assert verdict_of(0, 0, 300).findings == ()
    assert leaf_parts(measured(GROUP, 10, 0, 300)) == []


@settings(max_examples=30)
@given(
    leaves=lists(tuples(integers(2, 60), floats(-0.3, 0.3)), min_size=2, max_size=8),
    seed=integers(0, 2**32 - 1),
    max_drop=sampled_from([0.5, 2.0, 10.0]),
)
def test_an_alarm_needs_a_drop_above_the_limit(leaves: list[tuple[int, float]], seed: int, max_drop: float) -> None:
    sizes, drops = zip(*leaves, strict=True)
    guard = GROUP.model_copy(update={"max_drop": max_drop})
    scores = group(sizes, drops, 0.1, np.random.default_rng(seed))
    verdict = final(scores, guard)
    evidence = measure_guard(guard, "acc,none", scores, True)
    largest = max(part.drop for part in leaf_parts(evidence))
    if any(finding.kind == "task of the group" for finding in verdict.findings):
        assert largest > max_drop / 100
        assert verdict.outcome == "fail"
    assert sum(len(part.differences) for part in leaf_parts(evidence)) == len(scores.documents)


@pytest.mark.parametrize("size", sampled([2, 12, 30], [2, 12]))
@pytest.mark.parametrize("error", [0.05, 0.005, 0.0001])
def test_a_small_task_at_the_limit_raises_no_more_alarms_than_allowed(size: int, error: float) -> None:
    # The exact probability, for every discordance: lost and won documents of a task whose true drop is the limit.
    limit = 0.02
    alarms = {
        (lost, won)
        for lost in range(size + 1)
        for won in range(size + 1 - lost)
        if Part("t", np.array([1.0] * lost + [-1.0] * won + [0.0] * (size - lost - won))).exceeds(limit, error)
    }
    for discordance in (0.02, 0.05, 0.1, 0.3, 0.6, 1.0):
        p_lost, p_won = (discordance + limit) / 2, (discordance - limit) / 2
        chance = sum(
            binom.pmf(lost, size, p_lost) * binom.pmf(won, size - lost, p_won / (1 - p_lost)) for lost, won in alarms
        )
        assert chance <= 1.35 * error  # The test estimates the discordance from the documents.


def test_graded_scores_of_a_task_raise_an_alarm() -> None:
    rng = np.random.default_rng(3)
    reference = rng.uniform(0.4, 0.9, 900)
    merge = reference + rng.normal(0, 0.05, 900)
    documents = tuple((f"task_{doc % 9}", doc) for doc in range(900))
    merge[::9] -= 0.3
    scores = PairedScores(documents, tuple(reference), tuple(np.clip(merge, 0, 1)))
    verdict = final(scores, GROUP.model_copy(update={"max_drop": 4.0}))
    assert [finding.kind for finding in verdict.findings if finding.outcome == "fail"] == ["task of the group"]
    assert "task_0: drop of 3" in verdict.findings[0].reason
    equal = PairedScores(documents, tuple(reference), tuple(np.clip(reference + rng.normal(0, 0.05, 900), 0, 1)))
    assert final(equal).findings == ()


def test_related_documents_of_a_task_count_as_one() -> None:
    # All losses of task_0 are questions about one passage: one observation, and no alarm.
    documents = tuple((f"task_{doc // 100}", doc) for doc in range(1000))
    merge = tuple(0.0 if doc < 20 else 1.0 for doc in range(1000))
    passages = tuple(str(doc // 50) for doc in range(1000))
    guard = GROUP.model_copy(update={"cluster_by": "passage"})
    together = PairedScores(documents, (1.0,) * 1000, merge, passages)
    assert "task of the group" not in [finding.kind for finding in final(together, guard).findings]
    alone = PairedScores(documents, (1.0,) * 1000, merge)
    assert "task of the group" in [finding.kind for finding in final(alone).findings]


# --- Collapses that an early look cannot see


def test_a_group_does_not_pass_before_its_tasks_have_enough_documents() -> None:
    # 500 of 14,042 documents: the mean is decided, but each of 57 subjects has about nine documents.
    scores = group([246] * 57, [0.0] * 57, 0.0, np.random.default_rng(4))
    verdict = at_look(scores, 500)
    assert verdict.outcome == "inconclusive"
    assert verdict.reason.startswith("leaderboard: too few documents so far to rule out a collapse of task_")
    assert at_look(scores, 500, GROUP.model_copy(update={"leaf_limit": None})).outcome == "pass"
    decided = next(look for look in interim_looks(57 * 246, 500) if at_look(scores, look).outcome == "pass")
    assert decided <= 4000


def test_at_the_last_look_a_collapse_that_small_tasks_could_hide_is_a_note() -> None:
    scores = group([5] * 100, [0.0] * 100, 0.0, np.random.default_rng(5))
    verdict = final(scores)
    assert (verdict.outcome, [finding.outcome for finding in verdict.findings]) == ("pass", ["pass"])
    assert verdict.findings[0].reason.endswith("and 97 more")


def test_tiny_tasks_do_not_keep_a_large_group_open() -> None:
    scores = group([10, 12, 4000, 4000], [0.0] * 4, 0.0, np.random.default_rng(6))
    assert at_look(scores, 500).outcome == "pass"


def test_the_looks_spend_the_error_once() -> None:
    looks = interim_looks(14042, 500)
    assert math.isclose(sum(error_at_look(looks, look, 0.05) for look in looks), 0.05)
    assert error_at_look((300,), 300, 0.05) == 0.05


# --- Other metrics


def rows(metric: str, right: Sequence[bool] | NDArray[np.bool_], **changes: object) -> list[DocumentScore]:
    return [outcome(doc, float(value))._replace(metric=metric, **changes) for doc, value in enumerate(right)]


def judged(tmp_path: Path, reference: list[DocumentScore], merge: list[DocumentScore], guard: Guard) -> GuardVerdict:
    scores = {"base": [part(tmp_path / "base", reference)], "merge": [part(tmp_path / "merge", merge)]}
    return gate_scores(scores, guard).guards[0]


EVEN = np.arange(500) % 2 == 0
ACCURACY = Guard(task="reverse", guarded_by="base", metric="acc,none")
STRICT, FLEXIBLE = "exact_match,strict-match", "exact_match,flexible-extract"


def test_a_loss_under_strict_match_alone_fails_the_guard(tmp_path: Path) -> None:
    # Strict-match falls from 59.5 to 4.8, flexible-extract is equal.
    documents = np.arange(1000)
    reference, merge = (rows(FLEXIBLE, documents % 10 < 7) + rows(STRICT, documents < right) for right in (595, 48))
    verdict = judged(tmp_path, reference, merge, Guard(task="reverse", guarded_by="base"))
    assert (verdict.metric, verdict.drop, verdict.outcome) == (FLEXIBLE, 0.0, "fail")
    assert verdict.reason.startswith(f"reverse, {STRICT}: drop of 54.7 points against base [")


def test_a_metric_for_which_lower_is_better_is_compared_in_its_direction(tmp_path: Path) -> None:
    error = {"higher_is_better": False}
    more, fewer = (rows("errors,none", np.arange(500) < count, **error) for count in (200, 50))
    good = rows("acc,none", EVEN)
    assert judged(tmp_path / "worse", good + fewer, good + more, ACCURACY).outcome == "fail"
    assert judged(tmp_path / "better", good + more, good + fewer, ACCURACY).outcome == "pass"


def test_a_metric_outside_zero_to_one_and_the_probability_raise_no_alarm(tmp_path: Path) -> None:
    before, after = ([row._replace(outcome=value) for row in rows("words,none", EVEN)] for value in (90.0, 2.0))
    sure, unsure = (rows(f"{PROBABILITY},none", [value] * 500) for value in (True, False))
    good = rows("acc,none", EVEN)
    verdict = judged(tmp_path, good + before + sure, good + after + unsure, ACCURACY)
    assert verdict.outcome == "pass"
    (note,) = verdict.findings
    assert note.reason == "reverse: words,none not compared, because its scores are not between 0 and 1"


# --- Errors near the ceiling


def near_ceiling(before: int, both: int, after: int, n: int = 2000, guard: Guard = GROUP) -> GuardEvidence:
    """Return evidence with these numbers of wrong answers of the reference, of both, and of the merge."""
    reference = [0.0] * before + [1.0] * (n - before)
    merge = [0.0] * both + [1.0] * (before - both) + [0.0] * (after - both) + [1.0] * (n - before - after + both)
    scores = PairedScores(tuple(("t", doc) for doc in range(n)), tuple(reference), tuple(merge))
    return measure_guard(guard, "acc,none", scores, True)


@pytest.mark.parametrize("both", [0, 1, 2])
def test_sixteen_times_as_many_errors_fail_near_the_ceiling(both: int) -> None:
    (verdict,) = judge_guards([near_ceiling(2, both, 32)], 0.95)
    assert (verdict.outcome, verdict.drop) == ("fail", pytest.approx(1.5))
    assert verdict.reason.startswith("leaderboard: wrong answers rose from 2 to 32 of 2,000 against base")
    lenient = GROUP.model_copy(update={"max_error_ratio": None})
    assert judge_guards([near_ceiling(2, both, 32, guard=lenient)], 0.95)[0].outcome == "pass"


def test_a_few_more_errors_pass_near_the_ceiling() -> None:
    for before, after in ((0, 3), (2, 6), (20, 30), (100, 130)):
        assert judge_guards([near_ceiling(before, before // 2, after)], 0.95)[0].outcome == "pass"


@pytest.mark.parametrize("error", [0.05, 0.005])
@pytest.mark.parametrize(
    ("both", "won", "lost"), [(0, 5, 10), (0, 1, 2), (3, 2, 7), (10, 10, 30), (40, 0, 40), (0, 40, 80)]
)
def test_the_bound_of_the_error_ratio_is_rarely_above_the_truth(both: int, won: int, lost: int, error: float) -> None:
    # In truth, there are twice as many errors. The numbers are means of independent counts.
    rng, runs = np.random.default_rng(7), 20_000
    assert (both + lost) / (both + won) == 2
    old, new = rng.poisson(both + won, runs), rng.poisson(lost, runs)
    pairs, counts = np.unique(np.stack([old, new]), axis=1, return_counts=True)
    above = [error_ratio_bound(int(pair[0]), int(pair[1]), error) > 2 for pair in pairs.T]
    assert counts @ above / runs <= error + 3 * math.sqrt(error / runs)


def test_errors_far_from_the_ceiling_are_not_limited() -> None:
    assert near_ceiling(199, 0, 210).limits_errors
    assert not near_ceiling(200, 0, 210).limits_errors
    assert not near_ceiling(2, 0, 210, guard=GROUP.model_copy(update={"max_error_ratio": None})).limits_errors


# --- Advisory guards


def test_an_advisory_guard_is_judged_but_does_not_count(tmp_path: Path) -> None:
    scores = {}
    for model, wrong in (("base", 0), ("merge", 200)):
        other = rows("acc,none", EVEN & (np.arange(500) >= wrong), task="other")
        scores[model] = [part(tmp_path / model, rows("acc,none", EVEN)), part(tmp_path / f"{model}2", other)]
    guards = (Guard(task="reverse", guarded_by="base"), Guard(task="other", guarded_by="base", advisory=True))
    verdict = gate_scores(scores, *guards)
    assert (verdict.outcome, verdict.reasons, verdict.suites) == ("pass", (), ())
    words = {guard.task: guard.word for guard in verdict.all_guards}
    assert words == {"reverse": "pass", "other": "advisory: fail"}
    # It changes nothing about the other guards, as if the profile did not have it.
    assert verdict.guards == gate_scores(scores, guards[0]).guards
    assert not cannot_pass("other", guards, scores, GatePlan(GateRule()))
    counted = (guards[0], guards[1].model_copy(update={"advisory": False}))
    assert gate_scores(scores, *counted).outcome == "fail"
    assert cannot_pass("other", counted, scores, GatePlan(GateRule()))


def test_more_documents_are_not_evaluated_for_an_advisory_guard(tmp_path: Path) -> None:
    scores = {model: [part(tmp_path / model, rows("acc,none", EVEN))] for model in ("base", "merge")}
    schedule = {"reverse": (500, 1000, 4000)}
    guard = Guard(task="reverse", guarded_by="base", max_drop=0.5, margin=0.6, advisory=True)
    verdict = gate_scores(scores, guard, schedule=schedule)
    assert [each.outcome for each in verdict.advisory] == ["inconclusive"]
    assert undecided_tasks(verdict) == ()
    counted = guard.model_copy(update={"advisory": False})
    assert undecided_tasks(gate_scores(scores, counted, schedule=schedule))


def test_a_task_with_advisory_guards_only_has_one_look() -> None:
    task = EvalTask(name="mmlu", digest="d" * 64, definition=None, data_digest="e" * 64, documents=14042)
    guard = Guard(task="mmlu", guarded_by="base", advisory=True)
    counted = guard.model_copy(update={"advisory": False})
    assert plan_interim_looks(task, Evidence(tasks=(task,), guards=(guard,))) == (500,)
    assert plan_interim_looks(task, Evidence(tasks=(task,), guards=(guard, counted)))[-1] == 14042
    assert forecast_undecidable(Evidence(tasks=(task,), guards=(guard,)), attempts=1) is None


# --- The simulation


script = script_fixture("gate_alarms")


@pytest.mark.proof
@pytest.mark.parametrize("as_suite", [False, True])
def test_the_script_judges_groups_like_the_gate(script: ModuleType, as_suite: bool) -> None:
    rng = np.random.default_rng(8)
    sizes, schedule = [30, 100, 541, 1500], interim_looks(2171, 500)
    outcomes = set()
    for _ in range(60):
        drops = rng.choice([0.0, 0.0, 0.1, 0.5], 4)
        scores = group(sizes, drops.tolist(), 0.05, rng)
        for look in plan_looks(schedule, 0.95):
            guard = GROUP.model_copy(update={"max_error_ratio": None})
            seen = first_documents(scores, look.documents)
            evidence = measure_guard(guard, "acc,none", seen, True, schedule=schedule)
            (verdict,) = judge_guards([evidence], 0.95, as_suite=as_suite)
            leaves = leaf_parts(evidence)
            lost, won = (
                np.array([[(sign * leaf.differences > 0).sum() for leaf in leaves]], float) for sign in (1, -1)
            )
            counts = script.Counts(np.array([[len(leaf.differences) for leaf in leaves]]), lost, won)
            decided = script.judge_look(counts, look, schedule, as_suite=as_suite, alarms=True)
            word = "pass" if decided.passes[0] else "fail" if decided.fails[0] else "inconclusive"
            assert word == verdict.outcome
            outcomes.add(word)
    assert outcomes == {"pass", "fail", "inconclusive"}


def test_the_alarm_table_in_the_docs_meets_its_targets(script: ModuleType) -> None:
    rows = table_in_docs("alarm-error-rates.md", "alarms of groups")[1:]
    assert len(rows) == 2 * sum(1 + len(drops) for _, drops in script.GROUPS.values()) + len(script.GROUPS)
    for name, _, drop, *cells in rows:
        for cell in cells:
            before, after = (float(share) for share in cell.split(" · ")[0].split(" → "))
            if drop == "0":
                assert after >= max(before - 1, 97)
            elif drop == "all by 3":
                assert after <= 5
            elif (name, drop) != ("mmlu", "30"):
                assert after <= 1 + 2 * 0.5  # twice the standard error that the page states
    for _, *cells in table_in_docs("alarm-error-rates.md", "alarms of suites")[1:]:
        for cell in cells:
            before, after = (float(share) for share in cell.split(" → "))
            assert after >= before - 1.5

"""Power forecasts agree with the gate, and tasks skipped because a run cannot pass never change its verdict."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from gate_samples import measured, part
from samples import sampled

from mergegate.tasks.base.store import Artifact
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.stage import Scores
from mergegate.tasks.quality.gate.evidence import GatePlan
from mergegate.tasks.quality.gate.power import (
    PastGuardOutcome,
    PlannedTask,
    draw,
    estimate_discordance,
    find_past_discordance,
    gate_power,
    order_by_information,
    passing_merges,
    power_findings,
    publication_chance,
    undecidable_finding,
)
from mergegate.tasks.quality.gate.regression import judge_guards
from mergegate.tasks.quality.gate.sequential import chance_to_decide
from mergegate.tasks.quality.gate.settings import GateRule, Guard
from mergegate.tasks.quality.gate.stage import cannot_pass, gate
from mergegate.tasks.quality.gate.suite import judge_suite


def planned(tasks: int, n: int, discordance: float) -> list[PlannedTask]:
    return [PlannedTask(Guard(task=f"t{at}", guarded_by="base"), (n,), discordance) for at in range(tasks)]


@pytest.mark.proof
@pytest.mark.parametrize("as_suite", [True, False])
def test_a_batch_of_merges_is_judged_like_single_merges(as_suite: bool) -> None:
    rng = np.random.default_rng(5)
    drops = (0.0, 0.0, 0.035 if as_suite else 0.02)
    samples = [draw(Guard(task=f"t{at}", guarded_by="base"), drops[at], 0.10, 1500, 60, rng) for at in range(3)]
    together = passing_merges(samples, 0.95, as_suite=as_suite)
    for number in range(60):
        evidence = [measured(one.guard, int(one.lost[number]), int(one.won[number]), 1500) for one in samples]
        outcomes = [verdict.outcome for verdict in judge_guards(evidence, 0.95, as_suite=as_suite)]
        outcomes += [judge_suite(evidence, 0.95).outcome] if as_suite else []
        assert together[number] == (set(outcomes) == {"pass"})
    assert 0 < together.sum() < 60


def test_the_chances_match_the_table() -> None:
    assert publication_chance(planned(7, 500, 0.10), GateRule()) > 0.99
    assert publication_chance(planned(7, 500, 0.10), GateRule(rule="each")) == pytest.approx(0.06, abs=0.02)
    assert publication_chance(planned(1, 164, 0.20), GateRule()) == pytest.approx(0.20, abs=0.03)


def test_a_run_that_is_usually_undecided_is_a_warning_with_a_remedy() -> None:
    power = gate_power(planned(1, 164, 0.20), GateRule())
    (finding,) = power_findings(power)
    assert finding.severity == "warn"
    assert publication_chance(planned(1, power.documents_wanted, 0.20), GateRule()) >= 0.8
    assert list(power_findings(gate_power(planned(6, 1000, 0.10), GateRule()))) == []


@pytest.mark.story
def test_tasks_that_cannot_detect_their_limit_are_a_warning_before_the_run() -> None:
    small = PlannedTask(Guard(task="small", guarded_by="base"), (24,), 0.10)
    finding, _ = power_findings(gate_power([*planned(6, 1000, 0.10), small], GateRule()))
    assert finding.severity == "warn"
    assert "small detects 16.1 (limit 11)" in finding.found
    assert undecidable_finding([*planned(6, 1000, 0.10), small], GateRule()) is None
    # The mean of many small tasks can detect its margin, although no single task can detect its limit.
    many = [small._replace(guard=Guard(task=f"t{at}", guarded_by="base")) for at in range(60)]
    assert undecidable_finding(many, GateRule()) is None
    assert undecidable_finding([small], GateRule()) is not None


def test_a_detectable_drop_is_detected_four_times_in_five() -> None:
    tasks = planned(6, 500, 0.10)
    fall = gate_power(tasks, GateRule()).detectable / 100
    rng = np.random.default_rng(2)
    drawn = [draw(one.guard, fall, 0.10, 500, 4000, rng) for one in tasks]
    means = np.mean([(one.lost - one.won) / one.n for one in drawn], axis=0)
    assert np.mean(means > 0.02) == pytest.approx(0.8, abs=0.03)


def test_the_remaining_chance_matches_a_simulation() -> None:
    rng = np.random.default_rng(7)
    drop, error, share = 1.0, 2.0, 0.4
    variance = error**2 * share * 1000  # per document; 400 of 1,000 documents were seen
    truth = rng.normal(drop, error, 200_000)
    final = share * drop + (1 - share) * rng.normal(truth, np.sqrt(variance / 600))
    expected = np.mean(final <= -0.5) + np.mean(final > 2.5)
    assert chance_to_decide(drop, error, share, -0.5, 2.5) == pytest.approx(expected, abs=0.005)


def scored(place: Path, task: str, right: Iterable[float], first: int = 0) -> Artifact[Scores]:
    rows = [
        DocumentScore(task, "acc,none", doc, f"{doc}", "p", "t", float(one)) for doc, one in enumerate(right, first)
    ]
    return part(place, rows)


def known(place: Path, right: dict[str, list[float]], first: int = 0) -> dict[str, list[Artifact[Scores]]]:
    return {name: [scored(place / f"{name}{first}", "t", each, first)] for name, each in right.items()}


def test_discordance_is_that_of_the_nearest_model_without_the_difference_in_skill(tmp_path: Path) -> None:
    guard = Guard(task="t", guarded_by="own")
    own = [1.0] * 60 + [0.0] * 39
    near = [0.0] * 10 + [1.0] * 50 + [1.0] * 4 + [0.0] * 35  # lost 10, won 4
    far = [0.0] * 20 + [1.0] * 40 + [1.0] * 15 + [0.0] * 24
    found = estimate_discordance(guard, known(tmp_path, {"own": own, "far": far, "near": near}), 0.3)
    assert found.share == pytest.approx((2 * 4 + 0.5) / 100)
    source = "how own and near disagree on 99 documents, net of their skill gap"
    assert str(found) == f"8.5 % of answers differ (estimated from {source})"
    best = Guard(task="t", guarded_by="best parent")
    assert estimate_discordance(best, known(tmp_path / "b", {"far": far, "near": near, "own": own}), 0.3) == found


def test_a_parent_without_the_skill_is_not_comparable(tmp_path: Path) -> None:
    guard = Guard(task="t", guarded_by="skilled")
    scores = known(tmp_path, {"skilled": [1.0] * 99, "other": [0.0] * 98 + [1.0]})
    found = estimate_discordance(guard, scores, 0.1)
    assert (found.share, found.documents) == (0.1, 0)
    unskilled = known(tmp_path / "two", {"skilled": [1.0] * 99, "other": [0.0] * 98 + [1.0], "base": [1.0] * 99})
    assert estimate_discordance(guard, unskilled, 0.1).models == ("skilled", "base")


def test_merges_of_recent_runs_are_preferred_to_parents() -> None:
    guard = Guard(task="t", guarded_by="own")
    nights = [PastGuardOutcome("t", "own", 100, 60), *[PastGuardOutcome("t", "own", 100, 4)] * 5]
    others = [PastGuardOutcome("u", "own", 100, 90), PastGuardOutcome("t", "base", 100, 90)]
    found = find_past_discordance(guard, [*nights, *others])
    assert found.share == pytest.approx(20.5 / 501)
    source = "how the merges of the last 5 runs differed on 500 documents"
    assert str(found) == f"4.1 % of answers differ (estimated from {source})"
    assert find_past_discordance(guard, others) is None
    assert find_past_discordance(guard, [PastGuardOutcome("t", "own", 10, 1)]) is None


def test_without_shared_documents_the_assumption_is_used(tmp_path: Path) -> None:
    guard = Guard(task="t", guarded_by="base")
    one = known(tmp_path / "1", {"a": [1.0] * 50})
    other = known(tmp_path / "2", {"b": [1.0] * 50}, first=50)
    few = known(tmp_path / "3", {"a": [1.0] * 10, "b": [1.0] * 10})
    for scores in ({}, one, one | other, few, known(tmp_path / "4", {"a": [1.0] * 50}) | {"b": []}):
        found = estimate_discordance(guard, scores, 0.3)
        assert (found.share, found.documents) == (0.3, 0)
        assert str(found) == "30 % of answers differ (assumed, see evaluate.discordance)"


def test_graded_scores_that_differ_little_count_little(tmp_path: Path) -> None:
    guard = Guard(task="t", guarded_by="a", score_range=(0, 10))
    ups_and_downs = [7.0, 3.0] * 50
    found = estimate_discordance(guard, known(tmp_path, {"a": [5.0] * 100, "b": ups_and_downs}), 0.3)
    assert found.share == pytest.approx((100 * 0.04 + 0.5) / 101)


def test_the_forecast_has_a_line_per_task() -> None:
    tasks = [PlannedTask(Guard(task="t0", guarded_by="base"), (164,), 0.20, "20 % of answers differ (an assumption)")]
    power = gate_power(tasks, GateRule())
    together, alone, more = power.lines()
    assert together == f"power: {power.sentence()}"
    assert alone.startswith("power: t0: with 164 documents, a true drop of ")
    assert alone.endswith("is caught 80 % of the time, if 20 % of answers differ (an assumption)")
    documents = f"power: with about {power.documents_wanted:,} documents (now 164), "
    assert more == f"{documents}such a merge would pass 80 % of the time"


def test_the_lines_of_a_task_with_several_references_name_them() -> None:
    pairs = [("t0", "base"), ("t1", "base"), ("t1", "champion")]
    tasks = [PlannedTask(Guard(task=task, guarded_by=reference), (164,), 0.2) for task, reference in pairs]
    power = gate_power(tasks, GateRule())
    starts = [line.partition(": with")[0] for line in power.lines() if ": with 164" in line]
    assert starts == ["power: t0", "power: t1 against base", "power: t1 against champion"]
    assert ["reference" in task for task in power.model_dump()["tasks"]] == [False, True, True]


@pytest.mark.parametrize(
    ("documents", "extend", "remedy"), [(30, True, "add documents"), (30, False, "extend: true"), (400, True, "")]
)
def test_documents_that_can_never_decide_are_a_warning(documents: int, extend: bool, remedy: str) -> None:
    finding = undecidable_finding(planned(1, documents, 0.1), GateRule(extend=extend))
    assert (finding is not None) == bool(remedy)
    if finding is not None:
        assert remedy in finding.remedy
        assert f"all {documents} documents" in finding.found


def test_a_profile_without_guards_has_no_finding_about_its_documents() -> None:
    assert undecidable_finding([], GateRule()) is None


# --- A run that stops early would have failed anyway, in any task order

N = 300
TASKS = ("a", "b", "c")
GUARDS = tuple(Guard(task=task, guarded_by="base") for task in TASKS)
SCHEDULE = dict.fromkeys(TASKS, (N, 2 * N))


def merges(place: Path, drops: tuple[float, ...], seed: int) -> dict[str, list[Artifact[Scores]]]:
    """Return scores of base and merge on all tasks."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[Artifact[Scores]]] = {"base": [], "merge": []}
    for task, drop in zip(TASKS, drops, strict=True):
        shares = ((0.1 + drop) / 2, (0.1 - drop) / 2, 0.9)
        kinds = rng.choice(3, N, p=shares)
        found["base"].append(scored(place / "base" / task, task, kinds != 1))
        found["merge"].append(scored(place / "merge" / task, task, kinds != 0))
    return found


@pytest.mark.proof
@pytest.mark.parametrize("rule", sampled(["each", "suite"], ["suite"], pytest.mark.proof))
def test_only_runs_that_would_fail_stop_early(tmp_path: Path, rule: Literal["each", "suite"]) -> None:
    stopped, plan = 0, GatePlan(GateRule(rule=rule), schedule=SCHEDULE)
    drops = [(0.0, 0.0, 0.0), (0.06, 0.0, 0.0), (0.0, 0.09, 0.03), (0.09, 0.09, 0.0), (0.05, 0.05, 0.05)]
    for number, drop in enumerate(drops * 4):
        scores = merges(tmp_path / f"{number}", drop, number)
        whole = gate.work(GUARDS, scores, {}, None, plan)
        for order in permutations(range(3)):
            for run in range(1, 3):
                so_far = {model: [parts[at] for at in sorted(order[:run])] for model, parts in scores.items()}
                last = TASKS[order[run - 1]]
                if cannot_pass(last, GUARDS, so_far, plan):
                    waiting = tuple(TASKS[at] for at in sorted(order[run:]))
                    early = gate.work(GUARDS, so_far, {}, None, plan, waiting=waiting)
                    assert (early.outcome, whole.outcome) == ("fail", "fail")
                    assert tuple(one.task for one in early.not_run) == waiting
                    assert last in {one.task for one in early.guards if one.outcome == "fail"}
                    stopped += 1
                    break
    assert stopped > 40


def test_waiting_tasks_without_a_failed_guard_are_an_error(tmp_path: Path) -> None:
    scores = merges(tmp_path, (0.0, 0.0, 0.0), 1)
    some = {model: parts[:2] for model, parts in scores.items()}
    with pytest.raises(ValueError, match="nothing is decided"):
        gate.work(GUARDS, some, {}, None, GatePlan(GateRule(), schedule=SCHEDULE), waiting=("c",))


def test_tasks_are_ordered_by_information_per_second() -> None:
    same, different = (
        [PlannedTask(guard, (500,), share) for guard, share in zip(GUARDS, shares, strict=True)]
        for shares in ((0.1, 0.1, 0.1), (0.2, 0.05, 0.1))
    )
    seen = {"a": 500, "b": 500, "c": 500}
    assert order_by_information(same, seen, {"a": 1.0, "b": 1.0, "c": 1.0}) == ("a", "b", "c")
    assert order_by_information(same, seen, {"a": 4.0, "b": 1.0, "c": 2.0}) == ("b", "c", "a")
    assert order_by_information(same, seen, {"a": 4.0, "b": 1.0, "c": 0.0}) == ("c", "b", "a")  # free tasks come first
    assert order_by_information(different, seen, {"a": 1.0, "b": 1.0, "c": 1.0}) == ("b", "c", "a")
    assert order_by_information(same, seen | {"c": 2000}, {"a": 1.0, "b": 1.0, "c": 2.0}) == ("c", "a", "b")

"""Skipped tasks never change the verdict: a run that stops early would have failed anyway, in any task order."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Literal

import gate_samples as samples
import numpy as np
import pytest
from samples import sampled

from mergegate.tasks.evaluation.document_scores import DocumentScore
from mergegate.tasks.evaluation.stage import Scores
from mergegate.tasks.gate.power import PlannedTask, order_by_information
from mergegate.tasks.gate.settings import GateRule, Guard
from mergegate.tasks.gate.stage import GatePlan, cannot_pass, gate
from mergegate.tasks.store import Artifact

N = 300
TASKS = ("a", "b", "c")
GUARDS = tuple(Guard(task=task, guarded_by="base") for task in TASKS)
SCHEDULE = dict.fromkeys(TASKS, (N, 2 * N))


def scored(place: Path, task: str, right: np.ndarray) -> Artifact[Scores]:
    rows = [DocumentScore(task, "acc,none", doc, f"{doc}", "p", "t", float(each)) for doc, each in enumerate(right)]
    return samples.part(place / task, rows)


def merges(place: Path, drops: tuple[float, ...], seed: int) -> dict[str, list[Artifact[Scores]]]:
    """Return scores of base and merge on all tasks.

    The merge is worse by the given drops, and differs from the base on a tenth of the documents.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, list[Artifact[Scores]]] = {"base": [], "merge": []}
    for task, drop in zip(TASKS, drops, strict=True):
        shares = ((0.1 + drop) / 2, (0.1 - drop) / 2, 0.9)
        kinds = rng.choice(3, N, p=shares)
        found["base"].append(scored(place / "base", task, kinds != 1))
        found["merge"].append(scored(place / "merge", task, kinds != 0))
    return found


@pytest.mark.story
@pytest.mark.parametrize("rule", sampled(["each", "suite"], ["suite"]))
def test_only_runs_that_would_fail_stop_early(tmp_path: Path, rule: Literal["each", "suite"]) -> None:
    stopped = 0
    drops = [(0.0, 0.0, 0.0), (0.06, 0.0, 0.0), (0.0, 0.09, 0.03), (0.09, 0.09, 0.0), (0.05, 0.05, 0.05)]
    for number, drop in enumerate(drops * 4):
        scores = merges(tmp_path / f"{number}", drop, number)
        whole = gate.work(GUARDS, scores, {}, None, GatePlan(GateRule(rule=rule), schedule=SCHEDULE))
        for order in permutations(range(3)):
            for run in range(1, 3):
                so_far = {model: [parts[at] for at in sorted(order[:run])] for model, parts in scores.items()}
                last = TASKS[order[run - 1]]
                if cannot_pass(last, GUARDS, so_far, GatePlan(GateRule(rule=rule), schedule=SCHEDULE)):
                    waiting = tuple(TASKS[at] for at in sorted(order[run:]))
                    early = gate.work(
                        GUARDS, so_far, {}, None, GatePlan(GateRule(rule=rule), schedule=SCHEDULE), waiting=waiting
                    )
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


def planned(**share: float) -> list[PlannedTask]:
    return [PlannedTask(Guard(task=task, guarded_by="base"), (500,), each) for task, each in share.items()]


def test_tasks_are_ordered_by_information_per_second() -> None:
    same = planned(a=0.1, b=0.1, c=0.1)
    seen = {"a": 500, "b": 500, "c": 500}
    assert order_by_information(same, seen, {"a": 1.0, "b": 1.0, "c": 1.0}) == ("a", "b", "c")
    assert order_by_information(same, seen, {"a": 4.0, "b": 1.0, "c": 2.0}) == ("b", "c", "a")
    assert order_by_information(same, seen, {"a": 4.0, "b": 1.0, "c": 0.0}) == ("c", "b", "a")  # free tasks come first
    assert order_by_information(planned(a=0.2, b=0.05, c=0.1), seen, {"a": 1.0, "b": 1.0, "c": 1.0}) == ("b", "c", "a")
    assert order_by_information(same, seen | {"c": 2000}, {"a": 1.0, "b": 1.0, "c": 2.0}) == ("c", "a", "b")

"""What a night can tell, said before it: how likely an equal merge is published, and which fall would be found.

The chance is simulated with the gate's own decisions, on merges that are drawn: on each document the merge loses what
its reference had right with probability ``(discordance + drop) / 2``, wins what it had wrong with
``(discordance - drop) / 2``, and agrees otherwise. Looks are left out but for the confidence of the last one: what is
decided earlier is decided for the documents that it saves. Detectable falls are those of a normal mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import Finding
from mergegate.tasks.gate.guards import GateRule, Guard
from mergegate.tasks.gate.regression import is_within
from mergegate.tasks.gate.sequential import look_levels
from mergegate.tasks.gate.statistics import POWER, binary_bounds, normal_quantile
from mergegate.tasks.gate.suite import TaskDrop, information_shares, mean_drop, task_weights

UNLIKELY = 0.5  # chance that an equal merge is published below which a night is hardly worth it
_RUNS = 2000  # simulated merges: a chance is known to a point
_MOST = 64  # times as many documents as there are, beyond which no advice is given

Array = NDArray[np.float64]


class DrawnDrops(NamedTuple):
    """Lost and won documents of many merges on one task."""

    guard: Guard
    lost: Array
    won: Array
    n: int

    def at(self, confidence: float) -> TaskDrop:
        """Drop and bounds of each merge, points."""
        # Many merges have lost and won as many: each pair of counts is looked at once.
        counts, which = np.unique(np.stack([self.lost, self.won]), axis=1, return_inverse=True)
        low, high = (bound[which] for bound in binary_bounds(counts[0], counts[1], self.n, confidence))
        drop = 100 * (self.lost - self.won) / self.n
        return TaskDrop(self.guard.task, self.guard.weight, drop, 100 * low, 100 * high)


class PlannedTask(NamedTuple):
    """A guard, and what is known of its task before anything is scored.

    Args:
        looks: Documents after each look; the last is all that tonight may use.
        discordance: Share of documents on which merge and reference will disagree.
        basis: Where that is known from: ``7 % of answers differ (from 400 documents of math and code)``.
    """

    guard: Guard
    looks: tuple[int, ...]
    discordance: float
    basis: str = ""


class TaskPower(BaseModel):
    """What tonight's documents can show of one task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    documents: int
    discordance: float
    detectable: float  # points: the smallest fall that is found 4 times in 5
    basis: str = ""  # of the discordance, in words

    def sentence(self) -> str:
        """``gsm8k: a fall of 2.4 points is found 4 times in 5 with 1,319 documents, if 7 % of answers differ (…)``."""
        found = f"a fall of {self.detectable:.1f} points is found 4 times in 5 with {self.documents:,} documents"
        return f"{self.task}: {found}, if {self.basis or f'{100 * self.discordance:g} % of answers differ'}"


class GatePower(BaseModel):
    """What a night can tell."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chance: float  # that a merge which is truly equal to its references is published
    detectable: float  # points of the mean over all tasks, as of a task
    tasks: tuple[TaskPower, ...]
    documents_wanted: int | None  # of all tasks together, for a chance of 0.8 where it is less; None: no number does

    def sentence(self) -> str:
        """``an equal merge is published in 97 % of nights; a mean fall of 1.4 points is found 4 times in 5``."""
        fall = f"a {'mean ' if len(self.tasks) > 1 else ''}fall of {self.detectable:.1f} points"
        return f"an equal merge is published in {100 * self.chance:.0f} % of nights; {fall} is found 4 times in 5"

    def lines(self) -> tuple[str, ...]:
        """All that a person is told before the night, a line each: together, by task, and what more would buy."""
        more = ""
        if self.documents_wanted:
            more = (
                f"about {self.documents_wanted:,} documents instead of {self.documents:,} would publish it 4 times in 5"
            )
        said = (self.sentence(), *(one.sentence() for one in self.tasks), more)
        return tuple(f"power: {line}" for line in dict.fromkeys(said) if line)

    @property
    def documents(self) -> int:
        """That tonight may use, of all tasks together."""
        return sum({one.task: one.documents for one in self.tasks}.values())


def gate_power(planned: Sequence[PlannedTask], rule: GateRule, seed: int = 0) -> GatePower:
    """What the guards can tell of a merge.

    Args:
        planned: At least one.
        rule: With the confidence of the attempt in question.
    """
    chance = publication_chance(planned, rule, seed=seed)
    return GatePower(
        chance=chance,
        detectable=detectable_fall(planned, rule),
        tasks=tuple(
            TaskPower(
                task=one.guard.task,
                documents=one.looks[-1],
                discordance=one.discordance,
                detectable=detectable_fall([one], rule),
                basis=one.basis,
            )
            for one in planned
        ),
        documents_wanted=None if chance >= POWER else _wanted(planned, rule, seed),
    )


def power_finding(power: GatePower) -> Finding | None:
    """A warning where an equal merge would mostly not be published; None where it would."""
    if power.chance >= UNLIKELY:
        return None
    wanted = f"about {power.documents_wanted:,} documents" if power.documents_wanted else "far more documents"
    return Finding(
        "warn",
        "evaluate.tasks",
        found=f"{power.sentence()}, with {power.documents:,} documents",
        expected="an equal merge published in at least every second night",
        remedy=f"{wanted}, rule: suite, or a wider margin; a lower evaluate.discordance, if that is known to be lower",
    )


def order_by_information(
    planned: Sequence[PlannedTask], seen: Mapping[str, int], seconds: Mapping[str, float]
) -> tuple[str, ...]:
    """Tasks in the order in which they are asked: first what decides most in a second.

    What a task decides is how far apart its documents hold a merge that has lost nothing and one that has lost the
    margin: ``(margin / standard error)**2``, which is ``documents * margin**2 / discordance``; of several guards of a
    task the most. What it takes is the time of the documents that are not scored yet. One that takes none comes first;
    equals stay in the order in which they are given.

    Args:
        seen: Documents of each task that will have been seen after this look.
        seconds: That the look will take, of each task.
    """
    decides: dict[str, float] = {}
    for one in planned:
        evidence = seen[one.guard.task] * one.guard.upper_limit**2 / max(one.discordance, 1e-9)
        decides[one.guard.task] = max(evidence, decides.get(one.guard.task, 0.0))

    def in_a_second(task: str) -> float:
        return decides[task] / seconds[task] if seconds[task] else math.inf

    return tuple(sorted(decides, key=in_a_second, reverse=True))


def publication_chance(planned: Sequence[PlannedTask], rule: GateRule, drop: float = 0.0, *, seed: int = 0) -> float:
    """Share of merges that pass although they are truly ``drop`` points worse on every task."""
    rng = np.random.default_rng(seed)
    drawn = [draw(one.guard, drop / 100, one.discordance, one.looks[-1], _RUNS, rng) for one in planned]
    return float(passing(drawn, last_confidence(planned, rule), as_suite=rule.rule == "suite").mean())


def detectable_fall(planned: Sequence[PlannedTask], rule: GateRule) -> float:
    """Points: the smallest true fall of the mean that is found to be worse with power 0.8."""
    errors = [
        TaskDrop(one.guard.task, one.guard.weight, 0.0, 0.0, 100 * math.sqrt(one.discordance / one.looks[-1]))
        for one in planned
    ]
    error = mean_drop(errors)[2]
    limit = _mean_of(planned, lambda guard: guard.max_drop)
    quantile, power = normal_quantile(last_confidence(planned, rule)), normal_quantile(POWER)
    return float(max(limit + power * error, (quantile + power) * error))


def passing(samples: Sequence[DrawnDrops], confidence: float, *, as_suite: bool) -> NDArray[np.bool_]:
    """Which of the merges pass: each guard on its own, or the mean, where no task has fallen far.

    The alarm of a task is asked at the first step of Holm's procedure: a merge that raises one is stopped anyway.
    """
    drops = [one.at(confidence) for one in samples]
    guards = [one.guard for one in samples]
    if not as_suite or len({guard.task for guard in guards}) == 1:
        each = [
            is_within(drop.drop, drop.high, guard.max_drop, guard.upper_limit)
            for drop, guard in zip(drops, guards, strict=True)
        ]
        return np.asarray(np.logical_and.reduce(each))
    mean, _, high = mean_drop(drops)
    allowed = _mean_of(samples, lambda guard: guard.max_drop), _mean_of(samples, lambda guard: guard.upper_limit)
    passes = is_within(mean, high, *allowed)
    alarm = 1 - (1 - confidence) / len(samples)
    for one, drop in zip(samples, drops, strict=True):
        passes &= (drop.high <= one.guard.catastrophe) & (one.at(alarm).low <= one.guard.max_drop)
    return np.asarray(passes)


def draw(guard: Guard, drop: float, discordance: float, n: int, runs: int, rng: np.random.Generator) -> DrawnDrops:
    """Merges that are truly ``drop`` (of 1) worse, and differ from the reference on a share of the documents."""
    discordance = max(discordance, abs(drop))
    shares = [(discordance + drop) / 2, (discordance - drop) / 2, 1 - discordance]
    counts = rng.multinomial(n, shares, size=runs).astype(np.float64)
    return DrawnDrops(guard, counts[:, 0], counts[:, 1], n)


def last_confidence(planned: Sequence[PlannedTask], rule: GateRule) -> float:
    """One-sided, of the last look that tonight's documents allow."""
    weights = task_weights([TaskDrop(one.guard.task, one.guard.weight, 0.0, 0.0, 0.0) for one in planned])
    return look_levels(information_shares(weights, {one.guard.task: one.looks for one in planned}), rule.confidence)[-1]


def _mean_of(some: Sequence[PlannedTask] | Sequence[DrawnDrops], limit: Callable[[Guard], float]) -> float:
    return float(mean_drop([TaskDrop(one.guard.task, one.guard.weight, limit(one.guard), 0.0, 0.0) for one in some])[0])


def _wanted(planned: Sequence[PlannedTask], rule: GateRule, seed: int) -> int | None:
    """Documents of all tasks together, each twice as many until an equal merge is published 4 times in 5."""
    times = 2
    while times <= _MOST:
        more = [one._replace(looks=tuple(times * n for n in one.looks)) for one in planned]
        if publication_chance(more, rule, seed=seed) >= POWER:
            return sum(one.looks[-1] for one in more)
        times *= 2
    return None

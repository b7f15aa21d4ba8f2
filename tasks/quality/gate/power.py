"""Forecast the power of a run: the chance that an equally good merge passes, and the smallest drop that it detects.

The forecast starts from the *discordance*: the share of documents on which an equally good merge and its reference
differ. The first source with data provides it: merges of recent runs, evaluated models with a similar score, or
``evaluate.discordance`` of the profile. Two models of different skill differ on more documents, because the better one
also wins documents. The estimate removes this part: each document that the weaker model wins is paired with a document
that it loses, and the other losses do not count. Models with less than half or more than twice the score of the
reference are ignored. If several models remain, the nearest to the reference is used, because a merge is between its
parents.

The chance is simulated: the gate's own functions decide about randomly drawn merges. On each document, a drawn merge
loses an answer that its reference had right with probability ``(discordance + drop) / 2``, gains an answer that its
reference had wrong with probability ``(discordance - drop) / 2``, and agrees with it otherwise. Only the last interim
look is simulated, because an earlier decision would only save documents. Detectable drops assume a normal mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import Finding
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.quality.evaluation import Scores
from mergegate.tasks.quality.gate.evidence import stored_rows
from mergegate.tasks.quality.gate.regression import is_within
from mergegate.tasks.quality.gate.sequential import look_levels
from mergegate.tasks.quality.gate.settings import BEST_PARENT, GateRule, Guard
from mergegate.tasks.quality.gate.statistics import POWER, binary_bounds, normal_quantile
from mergegate.tasks.quality.gate.suite import TaskDrop, information_shares, mean_drop, mean_limits

UNLIKELY = 0.5  # Chance that an equally good merge passes below which a run is hardly worthwhile.
_RUNS = 2000  # Number of simulated merges. The standard error of the chance is about one point.
_MAX_FACTOR = 64  # Largest recommended number of documents, as a multiple of the documents that this run may use.

_LEAST_SHARED = 20  # Smallest number of documents from which a share is estimated.
_MAX_RUNS = 5  # Number of recent runs to use.
_COMPARABLE = 0.5  # Smallest comparable score, as a share of the better score.

Array = NDArray[np.float64]


class DrawnDrops(NamedTuple):
    """Number of documents that each of many simulated merges lost and won against a guard's reference, out of ``n``."""

    guard: Guard
    lost: Array
    won: Array
    n: int

    def at(self, confidence: float) -> TaskDrop:
        """Return the drop of each merge with its bounds, in points."""
        # Many merges have equal counts, so compute the bounds once for each pair of counts.
        counts, inverse = np.unique(np.stack([self.lost, self.won]), axis=1, return_inverse=True)
        low, high = (bound[inverse] for bound in binary_bounds(counts[0], counts[1], self.n, confidence))
        drop = 100 * (self.lost - self.won) / self.n
        return TaskDrop(self.guard.task, self.guard.weight, drop, 100 * low, 100 * high)


class PlannedTask(NamedTuple):
    """Guard with the planned looks and the expected discordance of its task."""

    guard: Guard
    looks: tuple[int, ...]  # Number of documents after each interim look; the last is the most that this run may use.
    discordance: float  # Expected share of documents on which the merge and its reference disagree, from 0 to 1.
    basis: str = ""  # Source of ``discordance`` in words: ``7 % of answers differ (from math and base on …)``.


class TaskPower(BaseModel):
    """Power of a run on one task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    documents: int
    discordance: float
    detectable: float  # Smallest drop that is detected with power 0.8, in points.
    limit: float  # Largest drop of this task alone, in points.
    basis: str = ""  # Source of the discordance, in words.
    # Reference of the guard. Empty if the task has only one guard.
    reference: Annotated[str, Field(exclude_if=lambda name: not name)] = ""

    @property
    def is_weak(self) -> bool:
        """Whether the task cannot carry a release, because a drop as large as its limit would not be detected."""
        return self.detectable > self.limit

    def sentence(self) -> str:
        """Return ``gsm8k: with 1,319 documents, a true drop of 2.4 points is caught 80 % of the time. …``."""
        basis = self.basis or f"{100 * self.discordance:g} % of answers differ"
        drop = f"a true drop of {self.detectable:.1f} points is caught {100 * POWER:.0f} % of the time"
        against = f" against {self.reference}" if self.reference else ""
        return f"{self.task}{against}: with {self.documents:,} documents, {drop}, if {basis}"


class GatePower(BaseModel):
    """Power of a run over all tasks, and by task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chance: float  # Chance that a merge as good as its references passes.
    detectable: float  # Smallest detectable mean drop over all tasks, in points.
    tasks: tuple[TaskPower, ...]
    documents_wanted: int | None  # Total that raises the chance to 0.8; None if it is that high, or no total suffices.

    def sentence(self) -> str:
        """Return ``a merge as good as its references passes 97 % of the time; a true drop of 1.4 points …``."""
        drop = f"a true {'mean ' if len(self.tasks) > 1 else ''}drop of {self.detectable:.1f} points"
        return (
            f"a merge as good as its references passes {100 * self.chance:.0f} % of the time; "
            f"{drop} is caught {100 * POWER:.0f} % of the time"
        )

    def lines(self) -> tuple[str, ...]:
        """Return the forecast as lines: all tasks together, each task, and the recommended number of documents."""
        more = ""
        if self.documents_wanted and round(100 * self.chance) < 100 * POWER:  # as printed in the line above
            more = (
                f"with about {self.documents_wanted:,} documents (now {self.documents:,}), such a merge would pass "
                f"{100 * POWER:.0f} % of the time"
            )
        sentences = (self.sentence(), *(task.sentence() for task in self.tasks), more)
        return tuple(f"power: {line}" for line in dict.fromkeys(sentences) if line)

    @property
    def documents(self) -> int:
        """Number of documents that this run may use, over all tasks."""
        return sum({task.task: task.documents for task in self.tasks}.values())


def gate_power(planned_tasks: Sequence[PlannedTask], rule: GateRule, seed: int = 0) -> GatePower:
    """Forecast the power of a run with at least one guard. ``rule`` has the confidence of the attempt."""
    chance = publication_chance(planned_tasks, rule, seed=seed)
    recommended, times = None, 2
    while chance < POWER and recommended is None and times <= _MAX_FACTOR:
        extended = [entry._replace(looks=tuple(times * n for n in entry.looks)) for entry in planned_tasks]
        if publication_chance(extended, rule, seed=seed) >= POWER:
            recommended = sum(entry.looks[-1] for entry in extended)
        times *= 2
    guards = Counter(entry.guard.task for entry in planned_tasks)
    return GatePower(
        chance=chance,
        detectable=detectable_mean_drop(planned_tasks, rule),
        tasks=tuple(
            TaskPower(
                task=entry.guard.task,
                documents=entry.looks[-1],
                discordance=entry.discordance,
                detectable=detectable_mean_drop([entry], rule),
                limit=entry.guard.catastrophe,
                basis=entry.basis,
                reference=entry.guard.guarded_by if guards[entry.guard.task] > 1 else "",
            )
            for entry in planned_tasks
        ),
        documents_wanted=recommended,
    )


def power_findings(power: GatePower) -> Iterator[Finding]:
    """Yield a warning on tasks with too few documents for their limit, and one if an equal merge is unlikely to pass.

    The second one means that a merge as good as its references has less than an even chance to pass.
    """
    if weak := list(dict.fromkeys(task for task in power.tasks if task.is_weak)):
        tasks = ", ".join(f"{task.task} detects {task.detectable:.1f} (limit {task.limit:g})" for task in weak[:3])
        tasks += f", and {len(weak) - 3} more" if len(weak) > 3 else ""
        yield Finding(
            "warn",
            "evaluate.tasks",
            found=f"too few documents to detect a drop as large as the limit of the task, in points: {tasks}",
            expected="a smaller detectable drop than limit. Such a task cannot carry a release alone",
            remedy="use a larger task or more documents, or rely on the other tasks",
        )
    if power.chance >= UNLIKELY:
        return
    advice = f"about {power.documents_wanted:,} documents" if power.documents_wanted else "far more documents"
    yield Finding(
        "warn",
        "evaluate.tasks",
        found=f"{power.sentence()}, with {power.documents:,} documents",
        expected=f"documents with which such a merge passes at least {100 * UNLIKELY:.0f} % of the time",
        remedy=f"use {advice}, rule: suite, or a wider margin, or lower evaluate.discordance if you know a lower value",
    )


def undecidable_finding(planned_tasks: Sequence[PlannedTask], rule: GateRule) -> Finding | None:
    """Return a warning if no merge can pass, because even all documents of the run are too few, else None.

    The best case is a merge that agrees with its references on every document. It must pass, and at least one task, or
    the mean of a suite, must be able to detect a drop as large as its limit.
    """
    if not planned_tasks:
        return None
    # With one extra loss and win, as in the bounds of an observed drop.
    agreeing = [entry._replace(discordance=2 / (entry.looks[-1] + 2)) for entry in planned_tasks]
    is_suite = rule.rule == "suite" and len({entry.guard.task for entry in agreeing}) > 1
    is_strong = any(detectable_mean_drop([entry], rule) <= entry.guard.catastrophe for entry in agreeing) or (
        is_suite and detectable_mean_drop(agreeing, rule) <= mean_limits(entry.guard for entry in agreeing)[1]
    )
    none = np.zeros(1)
    best = [DrawnDrops(entry.guard, none, none, entry.looks[-1]) for entry in planned_tasks]
    passes = passing_merges(best, last_confidence(planned_tasks, rule), as_suite=rule.rule == "suite").all()
    if passes and is_strong:
        return None
    documents = sum({entry.guard.task: entry.looks[-1] for entry in planned_tasks}.values())
    return Finding(
        "warn",
        "evaluate.tasks",
        found=f"too few documents to pass: with all {documents:,} documents that this run may evaluate, even a merge "
        "that agrees with its references on each of them is inconclusive",
        expected="enough documents for the margins of the guards",
        remedy="set evaluate.extend: true" if not rule.extend else "add documents, or widen the margins",
    )


def order_by_information(
    planned_tasks: Sequence[PlannedTask], documents: Mapping[str, int], seconds: Mapping[str, float]
) -> tuple[str, ...]:
    """Return tasks in evaluation order: the task with the most information per second first.

    The information of a task measures how well its documents separate an equal merge from a merge at the margin:
    ``(margin / standard error)**2``, which is ``documents * margin**2 / discordance``. If a task has several guards,
    the largest value counts. Tasks that take no time come first, and ties keep their order.

    Args:
        planned_tasks: Guards with the discordance of their tasks.
        documents: Number of documents of each task at the end of the next look.
        seconds: Time to score those of them that have no score yet.
    """
    information: dict[str, float] = {}
    for entry in planned_tasks:
        evidence = documents[entry.guard.task] * entry.guard.upper_limit**2 / max(entry.discordance, 1e-9)
        information[entry.guard.task] = max(evidence, information.get(entry.guard.task, 0.0))

    rates = {task: amount / seconds[task] if seconds[task] else math.inf for task, amount in information.items()}
    return tuple(sorted(rates, key=rates.__getitem__, reverse=True))


def publication_chance(
    planned_tasks: Sequence[PlannedTask], rule: GateRule, drop: float = 0.0, *, seed: int = 0
) -> float:
    """Simulate merges that are truly ``drop`` points worse on every task, and return the share that passes."""
    rng = np.random.default_rng(seed)
    drawn = [draw(entry.guard, drop / 100, entry.discordance, entry.looks[-1], _RUNS, rng) for entry in planned_tasks]
    return float(passing_merges(drawn, last_confidence(planned_tasks, rule), as_suite=rule.rule == "suite").mean())


def detectable_mean_drop(planned_tasks: Sequence[PlannedTask], rule: GateRule) -> float:
    """Return the smallest true drop of the mean over tasks, in points, that is detected with power 0.8."""
    errors = [
        TaskDrop(entry.guard.task, entry.guard.weight, 0.0, 0.0, 100 * math.sqrt(entry.discordance / entry.looks[-1]))
        for entry in planned_tasks
    ]
    error = mean_drop(errors)[2]
    limit, _ = mean_limits(entry.guard for entry in planned_tasks)
    quantile, power = normal_quantile(last_confidence(planned_tasks, rule)), normal_quantile(POWER)
    return float(max(limit + power * error, (quantile + power) * error))


def passing_merges(samples: Sequence[DrawnDrops], confidence: float, *, as_suite: bool) -> NDArray[np.bool_]:
    """Return which simulated merges pass: by every guard, or with ``as_suite`` by their mean and each task's limit.

    Each task is tested for failure at the first step of Holm's procedure, because one failed task stops a merge.
    """
    drops = [sample.at(confidence) for sample in samples]
    guards = [sample.guard for sample in samples]
    if not as_suite or len({guard.task for guard in guards}) == 1:
        each = [
            is_within(drop.drop, drop.high, guard.max_drop, guard.upper_limit)
            for drop, guard in zip(drops, guards, strict=True)
        ]
        return np.asarray(np.logical_and.reduce(each))
    mean, _, high = mean_drop(drops)
    passes = is_within(mean, high, *mean_limits(guards))
    alarm = 1 - (1 - confidence) / len(samples)
    for sample, drop in zip(samples, drops, strict=True):
        passes &= (drop.high <= sample.guard.catastrophe) & (sample.at(alarm).low <= sample.guard.max_drop)
    return np.asarray(passes)


def draw(guard: Guard, drop: float, discordance: float, n: int, runs: int, rng: np.random.Generator) -> DrawnDrops:
    """Simulate ``runs`` merges with a true drop (in [0, 1]) and discordance, each evaluated on ``n`` documents."""
    discordance = max(discordance, abs(drop))
    shares = [(discordance + drop) / 2, (discordance - drop) / 2, 1 - discordance]
    counts = rng.multinomial(n, shares, size=runs).astype(np.float64)
    return DrawnDrops(guard, counts[:, 0], counts[:, 1], n)


def last_confidence(planned_tasks: Sequence[PlannedTask], rule: GateRule) -> float:
    """Return the one-sided confidence of the last look of this run."""
    information = information_shares([(entry.guard, entry.looks) for entry in planned_tasks])
    return look_levels(information, rule.confidence)[-1]


class PastGuardOutcome(NamedTuple):
    """Comparison of an earlier merge with its reference, for a guard that did not fail.

    Args:
        documents: Number of documents on which merge and reference were compared.
        differing: Number of those documents on which they differed.
    """

    task: str
    reference: str
    documents: int
    differing: int


class Discordance(BaseModel):
    """Expected share of the documents of a task on which a merge and its reference disagree.

    For graded scores it is the mean squared difference. For scores of 0 or 1 the two are equal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float  # In (0, 1].
    documents: int = 0  # Number of compared documents; 0 if the share is an assumption.
    models: tuple[str, ...] = ()  # The two compared models; empty for merges of earlier runs.
    nights: int = 0  # Number of earlier runs whose merges were compared.

    def __str__(self) -> str:
        """Return ``7 % of answers differ (estimated from how math and base disagree on 400 documents, …)``."""
        if not self.documents:
            return f"{100 * self.share:g} % of answers differ (assumed, see evaluate.discordance)"
        share = f"{100 * self.share:.1f}".removesuffix(".0")
        if self.nights == 1:
            source = "the merge of the last run differed"
        elif self.nights:
            source = f"the merges of the last {self.nights} runs differed"
        else:
            source = f"{' and '.join(self.models)} disagree"
        correction = "" if self.nights else ", net of their skill gap"
        return f"{share} % of answers differ (estimated from how {source} on {self.documents:,} documents{correction})"


def find_past_discordance(guard: Guard, outcomes: Sequence[PastGuardOutcome]) -> Discordance | None:
    """Return the discordance of recent merges with the guard's reference on its task, or None with too few documents.

    One document that counts as half different is added, because no difference in 100 documents does not prove that
    there will never be one. ``outcomes`` come from earlier runs of the profile, oldest first.
    """
    matching = [
        outcome
        for outcome in outcomes
        if outcome.task == guard.task and guard.guarded_by in (outcome.reference, BEST_PARENT)
    ]
    recent = matching[-_MAX_RUNS:]
    documents = sum(outcome.documents for outcome in recent)
    if documents < _LEAST_SHARED:
        return None
    share = (sum(outcome.differing for outcome in recent) + 0.5) / (documents + 1)
    return Discordance(share=share, documents=documents, nights=len(recent))


def estimate_discordance(guard: Guard, scores: Mapping[str, Sequence[Artifact[Scores]]], guess: float) -> Discordance:
    """Return the discordance of the guard's reference with the evaluated model that differs least from it.

    ``scores`` holds the stored scores on the guard's task, by model. If no model with a similar score shares at least
    ``_LEAST_SHARED`` documents with the reference, the result is ``guess``.
    """
    by_model = {name: scored for name, parts in scores.items() if (scored := _read_scores(guard, parts))}
    if not by_model:
        return Discordance(share=guess)
    # If the guard names 'best parent' or a model without scores, the best model with scores is the reference.
    means = {name: fmean(scored.values()) for name, scored in by_model.items()}
    reference = guard.guarded_by if guard.guarded_by in by_model else max(means, key=means.__getitem__)
    reference_scores = by_model.pop(reference)
    shares: dict[str, tuple[float, int]] = {}  # Share and number of documents, by model.
    for name, scored in by_model.items():
        shared = reference_scores.keys() & scored.keys()
        if len(shared) < _LEAST_SHARED:
            continue
        sums = [math.fsum(values[document] for document in shared) for values in (reference_scores, scored)]
        if min(sums) < _COMPARABLE * max(sums):
            continue
        # Count as many losses as wins, plus half a document as in ``find_past_discordance``.
        differences = [reference_scores[document] - scored[document] for document in shared]
        won = math.fsum(change**2 for change in differences if change > 0)
        lost = math.fsum(change**2 for change in differences if change < 0)
        shares[name] = (2 * min(won, lost) + 0.5) / (len(shared) + 1), len(shared)
    if not shares:
        return Discordance(share=guess)
    nearest = min(shares, key=lambda name: shares[name][0])
    share, documents = shares[nearest]
    return Discordance(share=share, documents=documents, models=(reference, nearest))


def _read_scores(guard: Guard, parts: Sequence[Artifact[Scores]]) -> dict[tuple[str, ...], float]:
    """Return each document's score by the guard's metric, in [0, 1]. Empty if the model has no such scores."""
    low, high = guard.score_range
    return {
        (row.task, str(row.doc_id), row.doc_hash, row.prompt_hash): (row.outcome - low) / (high - low)
        for row in stored_rows(guard, parts)
    }

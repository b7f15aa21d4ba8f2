"""Compute the score of a candidate from the scores of its documents.

::

    score      = sum over terms of weight * mean over documents / sum of weights - change_penalty * change
    violation  = sum over constraints of max(0, mean of the reference - mean of the candidate - max_drop)

For every measure, more is better. Log-likelihoods are first cut at ``-clip``, because a single document of -20 nats
would dominate a mean over hundreds. Feasible candidates rank before infeasible ones, infeasible ones rank by the size
of their violation (Deb 2000, Comput. Methods Appl. Mech. Eng. 186:311), and candidates without a score come last.

With several objectives the terms stay separate, and the result is a front. The candidate of the front with the best
weighted sum is the one to be confirmed. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sweep.settings import Constraint, ObjectiveTerm, SweepSettings
from mergegate.tasks.sweep.trials import TEXT, MetricKey, Sheet, Trial

HAND_WRITTEN = ""  # name of the hand-written recipe among the references


@dataclass(frozen=True)
class Term:
    """One term of the score.

    Args:
        weight: Share of the score. The weights of all terms sum to 1.
        clip: Log-likelihoods below minus this value are raised to it. None: no limit.
        cluster_by: Document field that identifies clusters. None: documents are independent.
    """

    asked: MetricKey
    weight: float
    clip: float | None = None
    cluster_by: str | None = None

    def numbers(self, sheet: Sheet) -> NDArray[np.float64]:
        """Return the contribution of each document, ``[documents]``."""
        scores = sheet[self.asked]
        return scores if self.clip is None else np.maximum(scores, -self.clip)


@dataclass(frozen=True)
class Limit:
    """A limit on how far a candidate may fall on a task.

    Args:
        reference: Name of a parent, or ``HAND_WRITTEN``.
        max_drop: Largest allowed drop, in the unit of the scores, not in points.
    """

    asked: MetricKey
    reference: str
    max_drop: float


@dataclass(frozen=True)
class Objective:
    """Terms and limits of a search. Create it with :func:`objective_of`."""

    terms: tuple[Term, ...]
    limits: tuple[Limit, ...] = ()
    several: bool = False
    change_penalty: float = 0.0

    @property
    def asked(self) -> tuple[MetricKey, ...]:
        """Metrics that are needed of each document, without duplicates."""
        return tuple(dict.fromkeys([term.asked for term in self.terms] + [limit.asked for limit in self.limits]))

    @property
    def weights(self) -> dict[MetricKey, float]:
        """Weight of each (task, measure) in the score. The weights sum to 1."""
        return {term.asked: term.weight for term in self.terms}

    @property
    def clips(self) -> dict[MetricKey, float]:
        """Clip of each log-likelihood that has one."""
        return {term.asked: term.clip for term in self.terms if term.clip is not None}

    @property
    def guards(self) -> tuple[str, ...]:
        """Names of the parents that constraints compare with."""
        return tuple(dict.fromkeys(limit.reference for limit in self.limits if limit.reference != HAND_WRITTEN))

    def scores(self, sheet: Sheet, change: float = math.nan) -> tuple[float, ...]:
        """Return one score per objective, with NaN for an objective without documents.

        Args:
            sheet: Scores of all metrics in ``asked``.
            change: Relative size of the change. Required if the objective penalizes it.
        """
        penalty = self.change_penalty * change if self.change_penalty else 0.0
        means = [float(np.mean(term.numbers(sheet))) if len(sheet[term.asked]) else math.nan for term in self.terms]
        if self.several:
            return tuple(mean - penalty for mean in means)
        return (sum(term.weight * mean for term, mean in zip(self.terms, means, strict=True)) - penalty,)

    def total(self, scores: Sequence[float]) -> float:
        """Return the weighted sum of the scores; a single objective returns its score."""
        if not self.several:
            return scores[0]
        return sum(term.weight * score for term, score in zip(self.terms, scores, strict=True))

    def violation(self, sheet: Sheet, references: Mapping[str, Sheet]) -> float:
        """Return the sum of all constraint violations, 0 if every limit holds.

        Args:
            sheet: Scores on all documents, or on the first ones. They are compared with the reference on the same
                documents.
            references: Scores of the references on all documents, by name.
        """
        violation_sum = 0.0
        for limit in self.limits:
            candidate = sheet[limit.asked]
            reference = references[limit.reference][limit.asked][: len(candidate)]
            if len(candidate):
                violation_sum += max(0.0, float(reference.mean() - candidate.mean()) - limit.max_drop)
        return violation_sum


def objective_of(settings: SweepSettings, names: Mapping[str, str]) -> Objective:
    """Return the objective that the settings describe.

    Args:
        names: lm-eval's name of each task, by its name in the profile.

    Raises:
        InvalidInput: A metric occurs twice, a clip is set for a measure other than log-likelihood, a metric name is
            missing or superfluous, or ``multi_objective`` is set with a single objective.
    """
    terms = [_term(term, names, f"sweep.objective[{index}]") for index, term in enumerate(settings.objective)]
    keys = [term.asked for term in terms]
    for index, item in enumerate(keys):
        if item in keys[:index]:
            raise InvalidInput(
                f"sweep.objective[{index}]",
                found=f"{item.measure} of {item.task or 'the held-out text'} again",
                expected="each number once",
                remedy="one term with the sum of their weights",
            )
    if settings.multi_objective and len(terms) < 2:
        raise InvalidInput(
            "sweep.multi_objective", found="one objective", expected="two or more terms under 'objective'"
        )
    total = sum(term.weight for term in terms)
    return Objective(
        terms=tuple(Term(term.asked, term.weight / total, term.clip, term.cluster_by) for term in terms),
        limits=tuple(_limit(item, names, f"sweep.constraints[{i}]") for i, item in enumerate(settings.constraints)),
        several=settings.multi_objective,
        change_penalty=settings.change_penalty,
    )


def rank(scores: Sequence[Sequence[float]], violations: Sequence[float], objective: Objective) -> list[int]:
    """Return the rank of each candidate by Deb's rule, from 0 for the best. Ties share a rank, and NaN comes last."""
    keys = [_key(values, violation, objective) for values, violation in zip(scores, violations, strict=True)]
    ranks = {key: position for position, key in enumerate(sorted(set(keys)))}
    return [ranks[key] for key in keys]


def best_of(trials: Sequence[Trial], objective: Objective) -> Trial | None:
    """Return the best trial by Deb's rule, or None if no trial has a score.

    Only trials that were evaluated on all documents count. The first of several equal trials wins.
    """
    complete = [trial for trial in trials if not trial.dropped and not trial.problem and not _is_nan(trial.scores)]
    return min(complete, key=lambda trial: (_key(trial.scores, trial.violation, objective), trial.number), default=None)


def front(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the feasible trials on the Pareto front, sorted by number.

    No other feasible trial is at least as good in every objective and better in one.
    """
    complete = [trial for trial in trials if not trial.dropped and not trial.problem and not _is_nan(trial.scores)]
    feasible = [trial for trial in complete if trial.violation == 0]

    def is_dominated(trial: Trial) -> bool:
        return any(
            all(a >= b for a, b in zip(rival.scores, trial.scores, strict=True))
            and any(a > b for a, b in zip(rival.scores, trial.scores, strict=True))
            for rival in feasible
        )

    return tuple(sorted((trial for trial in feasible if not is_dominated(trial)), key=lambda trial: trial.number))


def _key(scores: Sequence[float], violation: float, objective: Objective) -> tuple[int, float]:
    total = objective.total(scores) if scores else math.nan
    if math.isnan(total) or math.isnan(violation):
        return (2, 0.0)
    return (1, violation) if violation > 0 else (0, -total)


def _is_nan(scores: Sequence[float]) -> bool:
    return not scores or any(math.isnan(score) for score in scores)


def _term(term: ObjectiveTerm, names: Mapping[str, str], location: str) -> Term:
    if term.clip is not None and term.measure != "log_likelihood":
        raise InvalidInput(f"{location}.clip", found=f"a clip of {term.measure}", expected="one of log_likelihood")
    if term.task is None and term.measure != "log_likelihood":
        raise InvalidInput(
            f"{location}.measure", found=f"{term.measure} of the held-out text", expected="log_likelihood, or a task"
        )
    return Term(_metric_key(term, term.task, names, location), term.weight, term.clip, term.cluster_by)


def _limit(constraint: Constraint, names: Mapping[str, str], location: str) -> Limit:
    key = _metric_key(constraint, constraint.task, names, location)
    return Limit(key, constraint.guarded_by or HAND_WRITTEN, constraint.max_drop / 100)


def _metric_key(
    setting: ObjectiveTerm | Constraint, task: str | None, names: Mapping[str, str], location: str
) -> MetricKey:
    if (setting.measure == "metric") != (setting.metric is not None):
        problem = "no metric" if setting.metric is None else f"metric with measure: {setting.measure}"
        raise InvalidInput(
            f"{location}.metric", found=problem, expected="the name of one with measure: metric, and only there"
        )
    return MetricKey(TEXT if task is None else names[task], setting.measure, setting.metric or "")

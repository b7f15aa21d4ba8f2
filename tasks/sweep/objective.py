"""Compute the score of a candidate from the scores of its documents.

::

    score      = sum over terms of weight * mean over documents / sum of weights - change_penalty * change
    violation  = sum over constraints of max(0, mean of the reference - mean of the candidate - max_drop)

For every measure, more is better. Log-likelihoods below ``-clip`` are raised to it, because a single document of -20
nats would dominate a mean over hundreds. With several objectives, each term is a score of its own. All functions are
pure.

A *score table* holds the scores of one model on one set of documents: for each metric, one number per document, in the
fixed order of the set. The tables of two models on the same set are therefore paired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sweep.settings import Measure, SweepSettings

TEXT = ""  # task name that stands for the held-out text of ``perplexity``
HAND_WRITTEN = ""  # name of the searched recipe with its start values, among the references


class MetricKey(NamedTuple):
    """Key of a metric, which gives each document of a task a number. More is better."""

    task: str  # lm-eval's name, or TEXT for the held-out text
    measure: Measure
    metric: str = ""  # lm-eval's label, for measure 'metric'


ScoresByMetric = Mapping[MetricKey, NDArray[np.float64]]  # [evaluated documents of the task], in the order of the set


@dataclass(frozen=True)
class Term:
    """One term of the score.

    Args:
        key: Metric that the term averages.
        weight: Weight in the score. The weights of all terms sum to 1.
        clip: Log-likelihoods below minus this value are raised to it. Default: no limit.
        cluster_by: Document field that identifies clusters. Default: documents are independent.
    """

    key: MetricKey
    weight: float
    clip: float | None = None
    cluster_by: str | None = None

    def numbers(self, table: ScoresByMetric) -> NDArray[np.float64]:
        """Return the scores of the documents for this term, after clipping."""
        scores = table[self.key]
        return scores if self.clip is None else np.maximum(scores, -self.clip)


@dataclass(frozen=True)
class Limit:
    """Limit on how far a candidate may fall on a task.

    Args:
        key: Metric that is limited.
        reference: Name of the parent to compare with, or ``HAND_WRITTEN``.
        max_drop: Largest allowed drop, in the unit of the scores, not in points.
    """

    key: MetricKey
    reference: str
    max_drop: float


@dataclass(frozen=True)
class Objective:
    """Terms and limits of a search. Create it with :func:`make_objective`."""

    terms: tuple[Term, ...]
    limits: tuple[Limit, ...] = ()
    multi_objective: bool = False
    change_penalty: float = 0.0

    @property
    def metric_keys(self) -> tuple[MetricKey, ...]:
        """Metrics of all terms and limits, without duplicates."""
        return tuple(dict.fromkeys([term.key for term in self.terms] + [limit.key for limit in self.limits]))

    @property
    def weights(self) -> dict[MetricKey, float]:
        """Weight of each metric in the score. The weights sum to 1."""
        return {term.key: term.weight for term in self.terms}

    @property
    def clips(self) -> dict[MetricKey, float]:
        """Clip of each metric that has one."""
        return {term.key: term.clip for term in self.terms if term.clip is not None}

    def scores(self, table: ScoresByMetric, change: float = math.nan) -> tuple[float, ...]:
        """Return one score per objective. It is NaN for an objective without documents.

        ``table`` has all ``metric_keys``. ``change`` is the relative size of the change from the base, which is
        required if there is a change penalty.
        """
        penalty = self.change_penalty * change if self.change_penalty else 0.0
        means = [float(np.mean(term.numbers(table))) if len(table[term.key]) else math.nan for term in self.terms]
        if self.multi_objective:
            return tuple(mean - penalty for mean in means)
        return (sum(term.weight * mean for term, mean in zip(self.terms, means, strict=True)) - penalty,)

    def total(self, scores: Sequence[float]) -> float:
        """Return the weighted sum of the scores of several objectives, or the score of a single one."""
        if not self.multi_objective:
            return scores[0]
        return sum(term.weight * score for term, score in zip(self.terms, scores, strict=True))

    def violation(self, table: ScoresByMetric, references: Mapping[str, ScoresByMetric]) -> float:
        """Return the sum of the amounts by which the candidate exceeds its limits, or 0 if it exceeds none.

        ``table`` may cover only the first documents. ``references`` are score tables on all documents, by name. Only
        documents in both are compared.
        """
        violation_sum = 0.0
        for limit in self.limits:
            candidate = table[limit.key]
            reference = references[limit.reference][limit.key][: len(candidate)]
            if len(candidate):
                violation_sum += max(0.0, float(reference.mean() - candidate.mean()) - limit.max_drop)
        return violation_sum


def make_objective(settings: SweepSettings, names: Mapping[str, str]) -> Objective:
    """Return the objective that the settings describe.

    ``names`` holds lm-eval's name of each task, by its name in the profile.

    Raises:
        InvalidInput: A metric occurs twice, a clip is set for a measure other than log-likelihood, a metric name is
            missing or superfluous, or ``multi_objective`` is set with a single objective.
    """
    total = sum(term.weight for term in settings.objective)
    terms: list[Term] = []
    for index, term in enumerate(settings.objective):
        location = f"sweep.objective[{index}]"
        if term.clip is not None and term.measure != "log_likelihood":
            raise InvalidInput(
                f"{location}.clip",
                found=f"a clip for the measure {term.measure}",
                expected="a clip only for log_likelihood",
            )
        if term.task is None and term.measure != "log_likelihood":
            raise InvalidInput(
                f"{location}.measure",
                found=f"the measure {term.measure} for the held-out text",
                expected="log_likelihood, or a task",
            )
        key = _metric_key(term.task, term.measure, term.metric, names, location)
        if any(key == previous.key for previous in terms):
            raise InvalidInput(
                location,
                found=f"{key.measure} of {key.task or 'the held-out text'} a second time",
                expected="each measure of a task at most once",
                remedy="use one term with the sum of their weights",
            )
        terms.append(Term(key, term.weight / total, term.clip, term.cluster_by))
    if settings.multi_objective and len(terms) < 2:
        raise InvalidInput(
            "sweep.multi_objective", found="only one objective", expected="two or more terms under 'objective'"
        )
    limits = []
    for index, constraint in enumerate(settings.constraints):
        location = f"sweep.constraints[{index}]"
        key = _metric_key(constraint.task, constraint.measure, constraint.metric, names, location)
        limits.append(Limit(key, constraint.guarded_by or HAND_WRITTEN, constraint.max_drop / 100))
    return Objective(tuple(terms), tuple(limits), settings.multi_objective, settings.change_penalty)


def _metric_key(
    task: str | None, measure: Measure, metric: str | None, names: Mapping[str, str], location: str
) -> MetricKey:
    if (measure == "metric") != (metric is not None):
        raise InvalidInput(
            f"{location}.metric",
            found="no metric" if metric is None else f"a metric with measure: {measure}",
            expected="the name of a metric with measure: metric, and only there",
        )
    return MetricKey(TEXT if task is None else names[task], measure, metric or "")

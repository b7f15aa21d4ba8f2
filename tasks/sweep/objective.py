"""Compute the score of a candidate from those of its documents, and drop hopeless candidates early. Pure functions.

::

    score      = sum over terms of weight * mean over documents / sum of weights - change_penalty * change
    violation  = sum over constraints of max(0, mean of the reference - mean of the candidate - max_drop)

For every measure, more is better. Log-likelihoods below ``-clip`` are raised to it, because a single document of -20
nats would dominate a mean over hundreds. With several objectives, each term is a score of its own.

A *score table* holds the scores of one model on one set of documents: for each metric, one number per document, in the
fixed order of the set. The tables of two models on the same set are therefore paired.

In a *race*, a candidate is evaluated on a growing share of each task's documents, and compared on them with the best
candidate so far, the *incumbent*. It is dropped at an interim look if the upper bound of their weighted mean difference
is below zero. The weights are those of the objective::

    D = sum over tasks of w_t * mean_t,     SE^2 = sum over tasks of w_t^2 * var_t / n_t
    dropped if  D + lead + z_i * SE < 0

The error is the chance to drop a candidate that is not worse. It is spent over the looks before the last one, as by
O'Brien & Fleming's bound (Lan & DeMets 1983, Biometrika 70:659). At the last look, no document is left to save. The
idea comes from Hoeffding races (Maron & Moore 1994) and F-race (Birattari et al. 2002). A dropped candidate gets the
incumbent's score plus the observed mean difference as its score.

With the rule ``halving``, the better third of each generation continues with three times the documents. This is cheap
but rough, and its error is not known.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sweep.settings import Measure, Racing, SweepSettings

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
    """One term of the score: the mean of a metric."""

    key: MetricKey
    weight: float  # the weights of all terms sum to 1
    clip: float | None = None  # log-likelihoods below minus this value are raised to it
    cluster_by: str | None = None  # document field that identifies clusters; None: documents are independent

    def numbers(self, table: ScoresByMetric) -> NDArray[np.float64]:
        """Return the scores of the documents for this term, after clipping."""
        scores = table[self.key]
        return scores if self.clip is None else np.maximum(scores, -self.clip)


@dataclass(frozen=True)
class Limit:
    """Limit on how far a candidate may fall on a task."""

    key: MetricKey
    reference: str  # name of the parent to compare with, or HAND_WRITTEN
    max_drop: float  # in the unit of the scores, not in points


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

    ``names`` holds lm-eval's name of each task, by its name in the profile. Raise InvalidInput if settings contradict.
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


_HALVING_FACTOR = 3  # with ``halving``, one in three candidates continues with three times the documents
_MIN_DOCUMENTS = 8  # smallest number of documents, over all tasks, that a decision is based on


@dataclass(frozen=True)
class Race:
    """Rule that decides during a trial whether to drop the candidate. Picklable."""

    incumbent: ScoresByMetric  # on all documents; if it is empty, every trial ends at its first look
    weights: Mapping[MetricKey, float]  # they sum to 1
    looks: tuple[float, ...]  # share of each task's documents that is evaluated by each look, increasing to 1
    error: float = 0.05  # chance, over all looks, of dropping a candidate that is not worse
    clips: Mapping[MetricKey, float] = field(default_factory=dict)
    lead: float = 0.0  # the incumbent's change penalty: a candidate's largest advantage apart from its documents

    def should_drop(self, table: ScoresByMetric, look: int) -> bool:
        """Return whether to drop a candidate at a look, given its scores so far. ``look`` is an index from 0."""
        if look >= len(self.looks) - 1:
            return False
        if not self.incumbent:
            return True
        differences = [self._differences(table, key) for key in self.weights]
        if (
            min(len(values) for values in differences) < 2
            or sum(len(values) for values in differences) < _MIN_DOCUMENTS
        ):
            return False
        mean = squared = 0.0
        for (key, weight), values in zip(self.weights.items(), differences, strict=True):
            # A few equal differences do not mean certainty. Assume at least the variance that results if one document
            # differs by a standard deviation of the incumbent's scores.
            floor = float(np.var(self._cut(self.incumbent[key], key))) / len(values)
            mean += weight * float(values.mean())
            squared += weight**2 * max(float(values.var(ddof=1)), floor) / len(values)
        level = spent_error(look, len(self.looks) - 1, self.error)
        return mean + self.lead + NormalDist().inv_cdf(1 - level) * math.sqrt(squared) < 0

    def difference(self, table: ScoresByMetric) -> float:
        """Return the weighted mean of candidate minus incumbent, over the documents in ``table``."""
        return sum(weight * float(self._differences(table, key).mean()) for key, weight in self.weights.items())

    def digest(self) -> str:
        """Return a digest of everything that determines when a candidate is dropped, as 64 hex digits."""
        sha256_hash = hashlib.sha256()
        rule = [self.looks, self.error, self.lead, sorted(self.weights.items()), sorted(self.clips.items())]
        sha256_hash.update(repr(rule).encode())
        for key in sorted(self.incumbent):
            sha256_hash.update(repr(key).encode() + np.ascontiguousarray(self.incumbent[key], dtype="<f8").tobytes())
        return sha256_hash.hexdigest()

    def _differences(self, table: ScoresByMetric, key: MetricKey) -> NDArray[np.float64]:
        scores = table[key]
        return self._cut(scores, key) - self._cut(self.incumbent[key][: len(scores)], key)

    def _cut(self, numbers: NDArray[np.float64], key: MetricKey) -> NDArray[np.float64]:
        return np.maximum(numbers, -self.clips[key]) if key in self.clips else numbers


def cumulative_shares(racing: Racing) -> tuple[float, ...]:
    """Return the share of each task's documents that is evaluated by each look.

    With the rule ``paired`` the shares double from ``racing.first`` to 1. With other rules, there is a single look.
    """
    shares, share = [], racing.first
    while racing.rule == "paired" and share < 1:
        shares.append(share)
        share *= 2
    return (*shares, 1.0)


def spent_error(look: int, interim: int, error: float) -> float:
    """Return the part of ``error`` that is spent at the look with index ``look``, one of ``interim`` interim looks."""

    def spent_until(share: float) -> float:
        normal = NormalDist()
        return 2 * normal.cdf(-normal.inv_cdf(1 - error / 2) / math.sqrt(share)) if share > 0 else 0.0

    return spent_until((look + 1) / interim) - spent_until(look / interim)


def halving_rounds(racing: Racing) -> tuple[Race | None, ...]:
    """Return the race of each round of ``halving``, or None for the last round, which evaluates all documents.

    In each race, every trial ends at a share of the documents. The shares grow from about ``racing.first``.
    """
    shares = [1.0]
    while shares[0] / _HALVING_FACTOR > 0.8 * racing.first:
        shares.insert(0, shares[0] / _HALVING_FACTOR)
    return (*(Race({}, {}, (share, 1.0)) for share in shares[:-1]), None)


def best_third(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the candidates in the better third, at least one, by their ``ranks`` (0 for the best)."""
    count = max(1, math.ceil(len(ranks) / _HALVING_FACTOR))
    return tuple(sorted(sorted(range(len(ranks)), key=lambda i: (ranks[i], i))[:count]))

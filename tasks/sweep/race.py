"""Drop hopeless candidates before they are evaluated on all documents, with a stated error. Pure functions.

A candidate is evaluated on growing shares of the documents and compared with the best candidate so far, the
*incumbent*, on the same documents. At each interim look the upper bound of the weighted mean paired difference decides.
It is stratified by task. Each task has the same share of its documents at each look, so the weights are those of the
objective::

    D = sum over tasks of w_t * mean_t,     SE^2 = sum over tasks of w_t^2 * var_t / n_t
    dropped if  D + lead + z_i * SE < 0

The error is the chance to drop a candidate that is not worse. It is spent over the looks like O'Brien & Fleming's bound
(Lan & DeMets 1983, Biometrika 70:659), as a function of the number of the look. All of it is spent before the last
look, at which there is nothing left to save. The idea comes from Hoeffding races (Maron & Moore 1994) and F-race
(Birattari et al. 2002). The score of a dropped candidate is the incumbent's score plus the observed mean paired
difference.

``halving`` is a cheap, rough rule without a stated error: the better third of each generation continues with three
times the documents.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.sweep.objective import MetricKey, ScoresByMetric
from mergegate.tasks.sweep.settings import Racing

_HALVING_FACTOR = 3  # halving: one in three candidates continues, with three times the documents
_MIN_DOCUMENTS = 8  # smallest number of documents, over all tasks, that a decision is based on


@dataclass(frozen=True)
class Race:
    """Rule that decides during a trial whether to drop the candidate. Picklable.

    Args:
        incumbent: Scores of the incumbent on all documents. Empty: there is no incumbent, and the trial always ends at
            the first look.
        weights: Weight of each metric in the score. They sum to 1.
        looks: Cumulative share of each task's documents at each look, increasing. The last one is 1.
        error: Chance, over all looks, of dropping a candidate that is not worse.
        clips: Log-likelihoods below minus this value are raised to it.
        lead: Largest advantage that a candidate can have before any document: the incumbent's change penalty.
    """

    incumbent: ScoresByMetric
    weights: Mapping[MetricKey, float]
    looks: tuple[float, ...]
    error: float = 0.05
    clips: Mapping[MetricKey, float] = field(default_factory=dict)
    lead: float = 0.0

    def should_drop(self, table: ScoresByMetric, look: int) -> bool:
        """Return whether to drop the candidate at this look.

        Args:
            table: Scores on the first documents of each task.
            look: Index of the look, from 0.
        """
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
            # Zero observed variance does not mean certainty. Assume at least the variance that results if one document
            # differs by a standard deviation of the incumbent.
            floor = float(np.var(self._cut(self.incumbent[key], key))) / len(values)
            mean += weight * float(values.mean())
            squared += weight**2 * max(float(values.var(ddof=1)), floor) / len(values)
        level = spent_error(look, len(self.looks) - 1, self.error)
        return mean + self.lead + NormalDist().inv_cdf(1 - level) * math.sqrt(squared) < 0

    def difference(self, table: ScoresByMetric) -> float:
        """Return the weighted mean of the candidate's scores minus the incumbent's.

        Only documents that both were evaluated on count.
        """
        return sum(weight * float(self._differences(table, key).mean()) for key, weight in self.weights.items())

    def digest(self) -> str:
        """Return a digest of everything that determines when a candidate is dropped: 64 hex digits."""
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
    """Return the cumulative share of each task's documents after each look of a candidate that is not dropped.

    With the rule ``paired``, each share is twice the one before it, from ``racing.first`` to 1. The last share can be
    less than twice the share before it.
    """
    shares, share = [], racing.first
    while racing.rule == "paired" and share < 1:
        shares.append(share)
        share *= 2
    return (*shares, 1.0)


def spent_error(look: int, interim: int, error: float) -> float:
    """Return the error that is spent at one interim look.

    Args:
        look: Index of the look, from 0.
        interim: Number of looks before the last.
        error: Error to spend over all interim looks.
    """

    def spent_until(share: float) -> float:
        normal = NormalDist()
        return 2 * normal.cdf(-normal.inv_cdf(1 - error / 2) / math.sqrt(share)) if share > 0 else 0.0

    return spent_until((look + 1) / interim) - spent_until(look / interim)


def halving_rounds(racing: Racing) -> tuple[Race | None, ...]:
    """Return the race of each halving round, with shares of the documents from about ``racing.first`` to 1.

    Each race evaluates its share and then stops. The last round has no race: it evaluates all documents.
    """
    shares = [1.0]
    while shares[0] / _HALVING_FACTOR > 0.8 * racing.first:
        shares.insert(0, shares[0] / _HALVING_FACTOR)
    return (*(Race({}, {}, (share, 1.0)) for share in shares[:-1]), None)


def best_third(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the candidates that continue to the next halving round: the better third, at least one.

    Args:
        ranks: Rank of each candidate, from 0 for the best.
    """
    count = max(1, math.ceil(len(ranks) / _HALVING_FACTOR))
    return tuple(sorted(sorted(range(len(ranks)), key=lambda i: (ranks[i], i))[:count]))

"""Drop hopeless candidates before they are evaluated on all documents, with a known error. Pure functions.

A candidate is evaluated on a growing share of each task's documents, and compared on them with the best candidate so
far, the *incumbent*. It is dropped at an interim look if the upper bound of their weighted mean difference is below
zero. The weights are those of the objective::

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

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.sweep.objective import MetricKey, ScoresByMetric
from mergegate.tasks.sweep.settings import Racing

_HALVING_FACTOR = 3  # with ``halving``, one in three candidates continues with three times the documents
_MIN_DOCUMENTS = 8  # smallest number of documents, over all tasks, that a decision is based on


@dataclass(frozen=True)
class Race:
    """Rule that decides during a trial whether to drop the candidate. Picklable.

    Args:
        incumbent: Scores of the incumbent on all documents. If it is empty, every trial ends at its first look.
        weights: Weight of each metric in the score. They sum to 1.
        looks: Share of each task's documents that is evaluated by each look, increasing to 1.
        error: Chance, over all looks, of dropping a candidate that is not worse. Default: 0.05.
        clips: Limit for each log-likelihood. Values below minus this limit are raised to it.
        lead: The incumbent's change penalty, which is the largest advantage of a candidate apart from its documents.
    """

    incumbent: ScoresByMetric
    weights: Mapping[MetricKey, float]
    looks: tuple[float, ...]
    error: float = 0.05
    clips: Mapping[MetricKey, float] = field(default_factory=dict)
    lead: float = 0.0

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

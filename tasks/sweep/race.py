"""Hopeless candidates are dropped before all documents are asked, with an error that is stated. Pure functions.

A candidate is asked on growing shares of the documents that the best so far, the *incumbent*, has been asked. At each
look the upper bound of its weighted mean paired difference decides, stratified by task: every task has its share of
documents at every look, so the weights are those of the objective::

    D = sum over tasks of w_t * mean_t,     SE^2 = sum over tasks of w_t^2 * var_t / n_t
    dropped if  D + lead + z_i * SE < 0

The error, of dropping a candidate that is not worse, is spent over the looks as O'Brien & Fleming's bound spends it
(Lan & DeMets 1983, Biometrika 70:659), by number of look, and all before the last, at which there is nothing left to
save. The idea is that of Maron & Moore 1994 (Hoeffding races) and of F-race (Birattari et al. 2002). A dropped
candidate is ranked by the incumbent's score and the mean paired difference seen.

``halving`` is the cheap and rough rule: of each generation the better third goes on to three times the documents. It
has no stated error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.sweep.settings import Racing
from mergegate.tasks.sweep.trials import MetricKey, Sheet

KEPT = 3  # halving: one of so many goes on, to so many times the documents
_FEWEST = 8  # documents of all tasks together before anything is decided


@dataclass(frozen=True)
class Race:
    """What a candidate is held against while it is asked. Picklable.

    Args:
        incumbent: Its numbers on all documents; empty: there is none, and the candidate is asked up to the first look,
            whatever comes out.
        weights: Of what counts, together 1.
        looks: Shares of each task's documents that have been asked at each look, rising; the last is 1.
        error: Chance, over all looks, to drop a candidate that is not worse.
        clips: Log-likelihoods are cut at minus this.
        lead: That the candidate may have before any document: what the incumbent is penalised for.
    """

    incumbent: Sheet
    weights: Mapping[MetricKey, float]
    looks: tuple[float, ...]
    error: float = 0.05
    clips: Mapping[MetricKey, float] = field(default_factory=dict)
    lead: float = 0.0

    def is_hopeless(self, seen: Sheet, look: int) -> bool:
        """Whether it is to be dropped.

        Args:
            seen: The first documents of each task.
            look: Number of the look, from 0.
        """
        if look >= len(self.looks) - 1:
            return False
        if not self.incumbent:
            return True
        differences = [self._differences(seen, asked) for asked in self.weights]
        if min(len(one) for one in differences) < 2 or sum(len(one) for one in differences) < _FEWEST:
            return False
        mean = squared = 0.0
        for (asked, weight), one in zip(self.weights.items(), differences, strict=True):
            # A spread of nothing is no certainty: at least that of one document that differs by a standard deviation.
            floor = float(np.var(self._cut(self.incumbent[asked], asked))) / len(one)
            mean += weight * float(one.mean())
            squared += weight**2 * max(float(one.var(ddof=1)), floor) / len(one)
        level = spent_at(look, len(self.looks) - 1, self.error)
        return mean + self.lead + NormalDist().inv_cdf(1 - level) * math.sqrt(squared) < 0

    def difference(self, seen: Sheet) -> float:
        """Weighted mean of candidate minus incumbent, on the documents that both have been asked."""
        return sum(weight * float(self._differences(seen, asked).mean()) for asked, weight in self.weights.items())

    def digest(self) -> str:
        """Of all that decides when a candidate is dropped: 64 hex digits."""
        found = hashlib.sha256()
        rule = [self.looks, self.error, self.lead, sorted(self.weights.items()), sorted(self.clips.items())]
        found.update(repr(rule).encode())
        for asked in sorted(self.incumbent):
            found.update(repr(asked).encode() + np.ascontiguousarray(self.incumbent[asked], dtype="<f8").tobytes())
        return found.hexdigest()

    def _differences(self, seen: Sheet, asked: MetricKey) -> NDArray[np.float64]:
        own = seen[asked]
        return self._cut(own, asked) - self._cut(self.incumbent[asked][: len(own)], asked)

    def _cut(self, numbers: NDArray[np.float64], asked: MetricKey) -> NDArray[np.float64]:
        return np.maximum(numbers, -self.clips[asked]) if asked in self.clips else numbers


def doubling_shares(first: float) -> tuple[float, ...]:
    """``first``, twice as much, ... and all: shares of the documents."""
    looks = []
    while first < 1:
        looks.append(first)
        first *= 2
    return (*looks, 1.0)


def cumulative_shares(racing: Racing) -> tuple[float, ...]:
    """Shares of each task's documents that have been asked after each look of a candidate that is not dropped."""
    return doubling_shares(racing.first) if racing.rule == "paired" else (1.0,)


def spent_at(look: int, interim: int, error: float) -> float:
    """Error that is spent at this look of those before the last.

    Args:
        look: From 0.
        interim: How many looks there are but for the last.
    """

    def up_to(share: float) -> float:
        normal = NormalDist()
        return 2 * normal.cdf(-normal.inv_cdf(1 - error / 2) / math.sqrt(share)) if share > 0 else 0.0

    return up_to((look + 1) / interim) - up_to(look / interim)


def heat(share: float) -> Race:
    """Ask up to ``share`` of the documents and no further: one round of halving."""
    return Race({}, {}, (share, 1.0))


def heats(racing: Racing) -> tuple[float, ...]:
    """Shares of the documents of each round of halving, from about ``racing.first``; the last is all."""
    shares = [1.0]
    while shares[0] / KEPT > 0.8 * racing.first:
        shares.insert(0, shares[0] / KEPT)
    return tuple(shares)


def going_on(places: Sequence[int]) -> tuple[int, ...]:
    """Numbers of those that go on to the next round of halving: the better third, at least one.

    Args:
        places: Of each candidate, from 0 for the best.
    """
    kept = max(1, math.ceil(len(places) / KEPT))
    return tuple(sorted(sorted(range(len(places)), key=lambda i: (places[i], i))[:kept]))

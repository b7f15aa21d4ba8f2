"""The statistics of the gate: intervals of paired differences, and how much evidence a decision takes. Pure functions.

All intervals are one-sided each way: ``low`` and ``high`` each err with probability ``1 - confidence``, so the pair
covers with ``2 * confidence - 1``. A gate asks one-sided questions ("is it worse?", "is it at most so much worse?").

Sources: Bonett & Price 2012 (J. Educ. Behav. Stat. 37:479) for the adjusted Wald interval of paired proportions;
Miller 2024 (arXiv 2411.00640) for pairing in evaluations; Connor 1987 (Biometrics 43:207) for sample sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

POWER = 0.80  # at which sample sizes and detectable drops are stated


class Difference(NamedTuple):
    """A mean paired difference with its interval, in the unit of the scores."""

    mean: float
    low: float
    high: float
    variance: float  # of one document's difference


class Ratio(NamedTuple):
    """A ratio with its interval."""

    ratio: float
    low: float
    high: float


def z(confidence: float) -> float:
    """One-sided normal quantile: 1.645 at 0.95."""
    return NormalDist().inv_cdf(confidence)


def t(confidence: float, degrees: int) -> float:
    """One-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, confidence))


def binary_difference(lost: int, won: int, n: int, confidence: float) -> Difference:
    """Difference of two paired proportions by the adjusted Wald interval of Bonett and Price.

    One document that changes each way is added before the interval is taken, so that its width is never zero: 200
    documents that all agree leave about a point open, not nothing.

    Args:
        lost: Documents that count +1: right by the reference, wrong by the merge.
        won: Documents that count -1.
        n: All documents, at least 1.
    """
    p_lost, p_won = (lost + 1) / (n + 2), (won + 1) / (n + 2)
    centre = p_lost - p_won
    variance = p_lost + p_won - centre**2
    half = z(confidence) * math.sqrt(variance / (n + 2))
    return Difference((lost - won) / n, max(-1.0, centre - half), min(1.0, centre + half), variance)


def graded_difference(differences: Sequence[float], confidence: float) -> Difference:
    """Mean of differences of graded scores by Student's interval, for scores in [0, 1].

    Never narrower than ``binary_difference`` is for as many documents that all agree: a sample in which nothing
    differed has no variance of its own to judge by.

    Args:
        differences: Reference minus merge for each document; at least 2.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    mean, variance = float(values.mean()), float(values.var(ddof=1))
    agreeing = binary_difference(0, 0, n, confidence)
    half = max(t(confidence, n - 1) * math.sqrt(variance / n), agreeing.high)
    return Difference(mean, mean - half, mean + half, variance)


def likelihood_ratio(differences: Sequence[float], weights: Sequence[int], confidence: float) -> Ratio:
    """Ratio of two perplexities on the same documents, with a delta-method interval over documents.

    The ratio is ``exp(sum(differences) / sum(weights))``. Documents are the independent units: the tokens inside one
    are not, so the error is that of a ratio estimator over documents.

    Args:
        differences: Log-likelihood by the reference minus that by the merge for each document, nats; at least 2.
        weights: Tokens (or bytes) of each document.
    """
    d, w = np.asarray(differences, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    n, total = len(d), float(w.sum())
    delta = float(d.sum()) / total
    stderr = math.sqrt(n / (n - 1) * float(((d - delta * w) ** 2).sum())) / total
    half = t(confidence, n - 1) * stderr
    return Ratio(_exp(delta), _exp(delta - half), _exp(delta + half))


def documents_needed(variance: float, distance: float, confidence: float, power: float = POWER) -> int:
    """Paired documents that show with ``power`` that a difference of ``distance`` is not zero.

    ``((z_a sqrt(v + d^2) + z_b sqrt(v)) / d)^2`` with the variance ``v`` under the alternative; for binary scores
    ``v + d^2`` is the share of documents on which the two models disagree.

    Args:
        variance: Of one document's difference.
        distance: Not zero, in the same unit.
    """
    spread = z(confidence) * math.sqrt(variance + distance**2) + z(power) * math.sqrt(variance)
    return math.ceil((spread / distance) ** 2)


def detectable_difference(variance: float, n: int, confidence: float, power: float = POWER) -> float:
    """Smallest true difference that ``n`` paired documents would have shown with ``power``."""
    return (z(confidence) + z(power)) * math.sqrt(variance / n)


def _exp(x: float) -> float:
    return math.exp(max(-700.0, min(700.0, x)))  # far beyond any limit, and still a number that JSON can hold

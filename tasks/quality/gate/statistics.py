"""Compute intervals of paired differences, and the number of documents that a decision needs. Pure functions.

A gate answers one-sided questions ("is it worse?", "is it at most this much worse?"). All bounds are therefore
one-sided: ``low`` and ``high`` each err with probability ``1 - confidence``, so the interval covers with probability
``2 * confidence - 1``.

Sources: Bonett & Price 2012 (J. Educ. Behav. Stat. 37:479) and Tango 1998 (Stat. Med. 17:891) for paired proportions;
Miller 2024 (arXiv 2411.00640) for pairing in evaluations; Connor 1987 (Biometrics 43:207) for sample sizes. For graded
scores see ``gate.graded_scores``; for clustered documents see ``gate.clusters``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

POWER = 0.80  # Power for which sample sizes and detectable drops are computed.


class Difference(NamedTuple):
    """Mean paired difference with its interval, in the unit of the scores."""

    mean: float
    low: float
    high: float
    variance: float  # Variance of the difference of one document.


def normal_quantile(confidence: float) -> float:
    """Return the one-sided normal quantile: 1.645 at 0.95."""
    return NormalDist().inv_cdf(confidence)


def student_quantile(confidence: float, degrees: int) -> float:
    """Return the one-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, confidence))


@lru_cache(maxsize=4096)  # One verdict computes the same bounds several times.
def binary_difference(losses: float, wins: float, n: float, confidence: float) -> Difference:
    """Return the difference of two paired proportions with the bounds of ``binary_bounds``.

    Args:
        losses: Number of documents on which the reference is right and the merge is wrong. Each counts +1.
        wins: Number of documents on which the merge is right and the reference is wrong. Each counts -1.
        n: Number of all documents, at least 1.
        confidence: One-sided confidence of each bound, in (0, 1).
    """
    counts = np.asarray(losses, dtype=np.float64), np.asarray(wins, dtype=np.float64)
    low, high = binary_bounds(*counts, n, confidence)
    _, variance = _adjusted(*counts, n)
    return Difference((losses - wins) / n, float(low), float(high), float(variance))


def binary_bounds(
    losses: NDArray[np.float64], wins: NDArray[np.float64], n: float, confidence: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bounds of the difference of paired proportions, vectorized over many samples of ``n`` documents.

    Each bound is the wider one of two intervals. The adjusted Wald interval of Bonett and Price, with one extra loss
    and one extra win, never has zero width. But it is computed from the variance of the sample: if few documents
    change, the samples with the best mean also have the smallest variance, and up to 7 % of the 95 % bounds are wrong.
    Tango's score interval uses the variance under each hypothetical difference, and is conservative in this case.

    ``losses`` and ``wins`` are counts of equal shape, which the returned ``low`` and ``high`` (in [-1, 1]) share.
    """
    center, variance = _adjusted(losses, wins, n)
    half = normal_quantile(confidence) * np.sqrt(variance / (n + 2))
    low = np.minimum(center - half, -_score_bound(wins, losses, n, confidence))
    high = np.maximum(center + half, _score_bound(losses, wins, n, confidence))
    return np.maximum(-1.0, low), np.minimum(1.0, high)


def _adjusted(
    losses: NDArray[np.float64], wins: NDArray[np.float64], n: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the adjusted mean and variance of one document's difference by Bonett and Price."""
    p_lost, p_won = (losses + 1) / (n + 2), (wins + 1) / (n + 2)
    center = p_lost - p_won
    return center, p_lost + p_won - center**2


def _score_bound(
    losses: NDArray[np.float64], wins: NDArray[np.float64], n: float, confidence: float
) -> NDArray[np.float64]:
    """Return Tango's upper bound, the largest difference that the score test does not reject, by bisection."""
    quantile = normal_quantile(confidence)
    low, high = (losses - wins) / n, np.ones_like(losses)
    for _ in range(50):
        middle = (low + high) / 2
        inside = score_statistic(losses, wins, n, middle) > -quantile
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return high


def score_statistic(
    losses: NDArray[np.float64], wins: NDArray[np.float64], n: float, difference: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """Return Tango's score statistic for the hypothesis that the true difference is ``difference``, in (-1, 1).

    It is standard normal under the hypothesis. For a difference of zero it is McNemar's statistic,
    ``(losses - wins) / sqrt(losses + wins)``.
    """
    b = -losses - wins + (2 * n - losses + wins) * difference
    c = -wins * difference * (1 - difference)
    p_won = (np.sqrt(np.maximum(0.0, b * b - 8 * n * c)) - b) / (4 * n)  # Most likely value under the hypothesis.
    spread = n * (2 * p_won + difference * (1 - difference))
    # If nothing changed and no change was expected, there is no evidence either way.
    return (losses - wins - n * difference) / np.sqrt(np.maximum(spread, 1e-300))


def selection_inflation(drop: float, high: float, confidence: float, max_drop: float, margin: float) -> float:
    """Return by how many points a score is expected to be too high because its documents also selected the model.

    The model is as good as its reference and was published because its drop passed. With a normal drop of standard
    error ``s`` that passes below ``c``, the drop of a published model is too low by ``s * pdf(c / s) / cdf(c / s)``
    (truncated normal mean). Half of it is luck of the model, the other half bad luck of the reference.

    Args:
        drop: Measured drop in points.
        high: Upper bound of the drop in points, with the one-sided ``confidence``.
        confidence: Confidence of ``high``, in (0.5, 1).
        max_drop: Largest drop that passes, in points.
        margin: Largest upper bound that passes, in points.
    """
    if (half := high - drop) <= 0:
        return 0.0
    normal = NormalDist(0.0, half / normal_quantile(confidence))
    largest = min(max_drop, margin - half)
    if (chance := normal.cdf(largest)) < 1e-6:  # Such a model hardly ever passes.
        return half / 2
    return normal.variance * normal.pdf(largest) / chance / 2


def share_bounds(count: int, n: int, confidence: float) -> tuple[float, float]:
    """Return the exact bounds of a share (Clopper & Pearson 1934, Biometrika 26:404).

    Args:
        count: Number of hits among ``n`` trials.
        n: Number of trials, 0 or more.
        confidence: One-sided confidence of each bound, in (0, 1).
    """
    from scipy.special import betaincinv

    low = float(betaincinv(count, n - count + 1, 1 - confidence)) if count else 0.0
    high = float(betaincinv(count + 1, n - count, confidence)) if count < n else 1.0
    return low, high


def selection_bias(scores: Sequence[Sequence[float]]) -> float:
    """Return by how much the best of ``K`` equally good models overestimates its true mean score (winner's curse).

    This is the expected maximum of ``K`` standard normals (0.56 for two, 0.85 for three) times the standard error that
    corresponds to half the variance of the difference of two models. It is exact for two models, and treats all pairs
    of more models as equally correlated. For models that truly differ, it is an upper limit.

    ``scores`` are the scores of the models on the same documents, ``[K][n]``.
    """
    from scipy.special import ndtr

    table = np.asarray(scores, dtype=np.float64)
    models, n = table.shape
    if models < 2 or n < 2:
        return 0.0
    # Half the variance of a difference, averaged over pairs, which is variance minus covariance.
    covariance = np.cov(table)
    own = float(np.trace(covariance)) / models
    shared = (float(covariance.sum()) - float(np.trace(covariance))) / (models * (models - 1))
    # The mean of the largest of ``K`` standard normals is the integral of ``1 - F^K - (1 - F)^K`` over x > 0.
    x = np.linspace(0.0, 9.0, 2001)
    below = ndtr(x)
    expected_maximum = float(np.trapezoid(1 - below**models - (1 - below) ** models, x))
    return expected_maximum * math.sqrt(max(0.0, own - shared) / n)


def documents_needed(variance: float, distance: float, confidence: float, power: float = POWER) -> int:
    """Return the number of paired documents with which a difference of ``distance`` is shown to be nonzero.

    The formula is ``((z_a sqrt(v + d^2) + z_b sqrt(v)) / d)^2`` with the variance ``v`` under the alternative. For
    binary scores ``v + d^2`` is the share of documents on which the two models disagree.

    Args:
        variance: Variance of the difference of one document.
        distance: Nonzero true difference, in the unit of the scores.
        confidence: One-sided confidence, in (0, 1).
        power: Probability that the documents show it, in (0, 1). Default: ``POWER``.
    """
    spread = normal_quantile(confidence) * math.sqrt(variance + distance**2) + normal_quantile(power) * math.sqrt(
        variance
    )
    return math.ceil((spread / distance) ** 2)

"""Bound the mean of graded scores at every sample size and at all interim looks together. Pure functions.

Student's interval of a mean assumes that the sample looks like its population. Graded scores may not. If a merge
loses 3 % of the documents completely and gains a little on the others, a sample without a lost document makes the merge
look better *and* the estimate more certain than they are. A merge at its margin is then published in one of five runs.
Only the range of a score is certain, so the bound is a betting bound (Waudby-Smith & Ramdas 2024, J. R. Stat. Soc. B
86:1). To refute that the mean difference is ``m`` or more, a player starts with 1 and bets that the difference ``D_t``
of each document in turn is below ``m``::

    W_t = W_(t-1) * (1 + bet_t * (m - D_t)),      D_t in [-1, 1],    0 <= bet_t < 1 / (1 - m)

``bet_t`` may depend on all documents before ``t``. If the true mean is ``m`` or more, the wealth ``W`` does not grow on
average, and the chance that it ever reaches ``1 / alpha`` is at most ``alpha`` (Ville 1939). On a grid that is fixed
in advance, the bound is the smallest value such that it and all larger values are refuted.

The bets decide how tight the bound is, never whether it is valid. They aim at the outcome of a test for normal scores:
wealth ``1 / alpha`` if that test rejects at one of the planned looks (``gate.sequential``). For normal scores,
the sum ``S`` of the differences is a Brownian motion, and ``V(t, S_t)`` is the chance that it still crosses the bound
of a look. A player with ``alpha * W = V`` who bets the slope ``d log V / dS`` per standard deviation ends at
``1 / alpha`` exactly if ``S`` crosses. Each bet is computed from the current wealth, which corrects the errors of
earlier bets. The idea comes from STaR-Bets (Voráček & Orabona 2025, arXiv 2505.22422), whose slope is
``sqrt(2 ln(1 / p) / documents left)``. For a single look, the slope here is ``phi(z) / (p * sqrt(documents left))``
with ``p = alpha * W`` and the normal quantile ``z`` of ``p``. The bound is close to that of the normal test, and it
holds at all looks together without a further correction.

Differences must be in the order in which the documents were scored, which is random and independent of the scores.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.quality.gate.sequential import plan_looks
from mergegate.tasks.quality.gate.statistics import Difference, documents_needed, normal_quantile

_TARGET_FACTOR = 1.1  # Bets aim at this multiple of 1 / alpha, because discrete steps fall a little short.
_MAX_BET_SHARE = 0.95  # Largest bet, as a share of the bet with which one document could take everything.
_PRIOR_VARIANCE = 0.25  # Assumed variance of a difference, weighted like one document.
_LARGEST_BET = 1e3

_LOG_P = np.linspace(math.log(1e-7), math.log(1 - 1e-4), 121)  # Values of log(alpha * W) at which slopes are tabulated.


def graded_difference(
    differences: Sequence[float] | NDArray[np.float64], confidence: float, schedule: Sequence[int] = ()
) -> Difference:
    """Return the mean difference of scores in [0, 1], with bounds that hold at all looks together.

    Args:
        differences: Reference minus merge for each document scored so far, in [-1, 1], in scoring order. At least 1.
        confidence: One-sided confidence of each bound, over all looks together.
        schedule: Number of documents after each planned look. Default: a single look at these documents.

    Raises:
        ValueError: A difference is outside [-1, 1], or there are more differences than planned.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    planned = tuple(schedule) or (n,)
    if not (np.abs(values) <= 1).all():
        raise ValueError("a difference of scores in [0, 1] must be in [-1, 1]")
    if not 1 <= n <= planned[-1]:
        raise ValueError(f"{n} differences, but {planned[-1]} were planned")
    mean = float(values.mean())
    low, high = _bounds(values.tobytes(), confidence, planned)
    variance = float(values.var(ddof=1)) if n > 1 else _PRIOR_VARIANCE
    return Difference(mean, min(low, mean), max(high, mean), variance)


def refutes(
    differences: NDArray[np.float64], means: NDArray[np.float64] | float, confidence: float, schedule: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Return for each hypothesis "the mean difference is at least this large" whether the differences refute it.

    Pass one sample with many hypotheses, or many samples with one hypothesis each.

    Args:
        differences: Differences in scoring order: ``[n]`` for one sample, ``[samples, n]`` for many.
        means: Hypothetical means in (-1, 1): ``[means]`` for one sample; a scalar or ``[samples]`` for many.
        confidence: One-sided confidence over all planned looks, in (0, 1).
        schedule: Number of documents after each planned look. ``n`` may be less than the last entry.
    """
    alpha = 1 - confidence
    slopes = _slopes(schedule, confidence)
    columns = np.ascontiguousarray(np.atleast_2d(differences).T)  # [n, samples or 1]
    hypotheses = np.broadcast_to(np.asarray(means, dtype=np.float64), np.broadcast_shapes(np.shape(means), (1,)))
    shape = np.broadcast_shapes(hypotheses.shape, columns.shape[1:])
    is_refuted = np.zeros(shape, dtype=bool)
    open_indices = np.arange(shape[0])  # Hypotheses that are not refuted yet.
    log_wealth = np.full(shape, math.log(alpha / _TARGET_FACTOR))
    hypotheses = np.broadcast_to(hypotheses, shape)
    largest = _MAX_BET_SHARE / (1 - hypotheses)
    per_sample = columns.shape[1] > 1
    # Before each document, estimate the standard deviation of a difference from the documents so far.
    before = np.zeros((2, *columns.shape))
    np.cumsum(columns[:-1], axis=0, out=before[0, 1:])
    np.cumsum(columns[:-1] ** 2, axis=0, out=before[1, 1:])
    count = np.arange(len(columns))[:, None]
    squares = np.maximum(0.0, before[1] - before[0] ** 2 / np.maximum(count, 1))
    spread = np.sqrt((_PRIOR_VARIANCE + squares) / (count + 1))
    target = -math.log(_TARGET_FACTOR)
    for t in range(len(columns)):
        column, sigma = (columns[t][open_indices], spread[t][open_indices]) if per_sample else (columns[t], spread[t])
        bet = np.minimum(np.interp(log_wealth, _LOG_P, slopes[t]) / sigma, largest)
        log_wealth = log_wealth + np.log1p(bet * (hypotheses - column))
        reached = log_wealth >= target
        if reached.any():
            is_refuted[open_indices[reached]] = True
            open_ = ~reached
            open_indices, log_wealth = open_indices[open_], log_wealth[open_]
            hypotheses, largest = hypotheses[open_], largest[open_]
            if not len(open_indices):
                break
    return is_refuted


def graded_documents_needed(variance: float, distance: float, confidence: float) -> int:
    """Return the number of documents that ``graded_difference`` needs to refute a value ``distance`` from the mean.

    ``variance`` is that of one document's difference. Even if it is tiny, a minimum number of documents is needed,
    because a document that loses everything may not have been sampled yet.
    """
    distance = min(distance, 0.999)
    # With the largest bet on each document. At distances below a fifth of a point, the variance needs more documents.
    least = math.ceil(-math.log(1 - confidence) / math.log1p(_MAX_BET_SHARE * distance / (1 - distance)))
    if distance >= 0.002:
        candidates = range(least, 2 * least + 100)
        position = bisect_left(
            candidates, True, key=lambda n: graded_difference(np.zeros(n), confidence).high <= distance
        )
        least = candidates[0] + position
    return max(least, documents_needed(variance, distance, confidence))


@lru_cache(maxsize=256)  # One verdict computes the same bounds several times.
def _bounds(values: bytes, confidence: float, schedule: tuple[int, ...]) -> tuple[float, float]:
    """Return the lower and upper bound. ``values`` are the differences as float64 bytes, which are hashable."""
    differences = np.frombuffer(values)
    return -_upper_bound(-differences, confidence, schedule), _upper_bound(differences, confidence, schedule)


def _upper_bound(values: NDArray[np.float64], confidence: float, schedule: tuple[int, ...]) -> float:
    """Return the smallest grid value above the sample mean such that it and all larger values are refuted."""
    # Only the plan determines the grid. If the bound is below the true mean, a grid value below the true mean has been
    # refuted. Grid values are slightly below round numbers, so that a bound of 3 points meets a margin of 3.
    steps = 10_000 if schedule[-1] >= 500 else 1_000
    grid = np.arange(-steps, steps) / steps - 1e-9
    above = grid[(grid > values.mean()) & (grid > -1)]
    open_ = np.flatnonzero(~refutes(values, above, confidence, schedule))
    if not len(open_):
        return float(values.mean())
    last = int(open_[-1]) + 1
    return float(above[last]) if last < len(above) else 1.0


@lru_cache(maxsize=4)  # 14 MB for 14,042 documents.
def _slopes(schedule: tuple[int, ...], confidence: float) -> NDArray[np.float64]:
    """Return the bet on each document per standard deviation for each value of ``_LOG_P``, as ``[n, p]``.

    ``V`` is propagated backward from the last look to the first as ``P(cross now) + E[V afterward; not crossed]``, for
    a Brownian motion with variance 1 per document. Between the last two looks only the first term exists, and the slope
    has a closed form.
    """
    from scipy.special import ndtri

    slopes = np.empty((schedule[-1], len(_LOG_P)))
    after: _Value | None = None
    for look, first in reversed(list(zip(plan_looks(schedule, confidence), (0, *schedule), strict=False))):
        bound = normal_quantile(look.confidence) * math.sqrt(look.documents)
        span = look.documents - first
        remaining = np.arange(span, 0, -1, dtype=np.float64)  # Documents left until the look, before each document.
        if after is None:
            z = ndtri(np.exp(_LOG_P))
            steepness = np.exp(-0.5 * z**2 - _LOG_P)[None, :] / math.sqrt(2 * math.pi)
        else:
            knots = np.unique(np.geomspace(1, span, 24).round())
            # At each knot, ``d log V / dS`` at ``_LOG_P``, times the root of the remaining documents.
            rows = np.empty((len(knots), len(_LOG_P)))
            for index, knot in enumerate(knots):
                promise = _value(float(knot), bound, look.documents, after)
                height = np.log(promise.value)
                row = np.interp(_LOG_P, height, np.gradient(height, promise.sums))
                rows[index] = row * math.sqrt(float(knot))
            # Interpolate linearly between the knots, on a logarithmic scale.
            if len(knots) == 1:
                steepness = np.repeat(rows, span, axis=0)
            else:
                positions, log_knots = np.log(remaining), np.log(knots)
                lower = np.clip(np.searchsorted(log_knots, positions, side="right") - 1, 0, len(knots) - 2)
                share = ((positions - log_knots[lower]) / (log_knots[lower + 1] - log_knots[lower]))[:, None]
                steepness = (1 - share) * rows[lower] + share * rows[lower + 1]
        slopes[first : look.documents] = np.clip(steepness / np.sqrt(remaining)[:, None], 0.0, _LARGEST_BET)
        after = _value(float(span), bound, look.documents, after)
    return slopes


class _Value(NamedTuple):
    """``V`` as a function of the current sum. Both arrays increase."""

    sums: NDArray[np.float64]
    value: NDArray[np.float64]


def _value(remaining: float, bound: float, documents: int, after: _Value | None) -> _Value:
    """Return, by current sum, the chance to cross ``bound`` after ``remaining`` more documents, or a later bound.

    ``documents`` is the number of documents at the look of ``bound``. The range of sums scales with its square root.
    """
    from scipy.special import ndtr

    root = math.sqrt(remaining)
    far = np.linspace(bound - 12 * math.sqrt(documents), bound, 300)
    sums = np.unique(np.concatenate([far, bound + root * np.linspace(-7, 4, 221)]))
    value = ndtr((sums - bound) / root)
    if after is not None:
        nodes, weights = np.polynomial.legendre.leggauss(48)
        end = np.clip((bound - sums) / root, -8.0, 8.0)
        z = -8.0 + (end[:, None] + 8.0) * (nodes + 1) / 2
        density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi) * weights * (end[:, None] + 8.0) / 2
        later = np.exp(np.interp(sums[:, None] + root * z, after.sums, np.log(after.value)))
        value = value + (density * later).sum(axis=1)
    usable = (value > 1e-14) & (value < 1) & (np.diff(value, prepend=0.0) > 0)
    return _Value(sums[usable], value[usable])

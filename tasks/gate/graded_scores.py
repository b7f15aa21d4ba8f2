"""Bound the mean of graded scores at every sample size and at all interim looks together. Pure functions.

Student's interval of a mean assumes that the sample looks like its population. Graded scores violate this: if 3 % of
the documents lose everything and the others gain a little, a sample without such a document looks better *and* more
certain than the truth, and a merge at its margin is published in one case out of five. The only certain fact is the
range of a score. The bound is therefore a betting bound (Waudby-Smith & Ramdas 2024, J. R. Stat. Soc. B 86:1). To
refute that the mean difference is ``m`` or more, a player starts with 1 and bets that each document in turn comes out
below ``m``::

    W_t = W_(t-1) * (1 + bet_t * (m - D_t)),      D_t in [-1, 1],    0 <= bet_t < 1 / (1 - m)

``bet_t`` may depend on everything before ``t``. While the mean is ``m`` or more, the expected value of ``W`` does not
grow, and the chance that it ever reaches ``1 / alpha`` is at most ``alpha`` (Ville 1939). The bound is the smallest
mean at and above which every mean is refuted, on a grid that is fixed before any document is scored.

The bet decides how wide the bound is, never whether it holds. Our bet pays off when a test with normal scores would
reject at one of the planned looks (``tasks.gate.sequential``). If scores were a Brownian motion, the value of this
promise would be ``V(t, S_t)``, the chance that the path ``S`` still crosses a bound. A player who owns ``alpha * W =
V`` now and bets the slope ``d log V / dS`` per standard deviation ends at ``1 / alpha`` exactly on the paths that
cross. The bet is computed from the current wealth, so it corrects what earlier bets have missed. The idea comes from
STaR-Bets (Voráček & Orabona 2025, arXiv 2505.22422), which uses ``sqrt(2 ln(1 / p) / documents left)`` as the slope. At
a single look the slope is ``phi(z) / (p * sqrt(documents left))`` with ``p = alpha * W`` and ``z`` its normal quantile.
As a result, the bound comes close to the normal one, spends its error as the looks do, and one process serves all of
them, so no look needs a second correction.

Documents must arrive in the order in which they were scored, which is random and independent of their scores.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.gate.sequential import plan_looks
from mergegate.tasks.gate.statistics import Difference, documents_needed, normal_quantile

_TARGET_FACTOR = 1.1  # The target is this multiple of 1 / alpha, because discrete steps fall a little short.
_MAX_BET_SHARE = 0.95  # Share of the largest possible bet, so that no single document can take everything.
_PRIOR_VARIANCE = 0.25  # Variance of a difference before any document is scored; counts as one document.
_LARGEST_BET = 1e3

_LOG_P = np.linspace(math.log(1e-7), math.log(1 - 1e-4), 121)  # Values of log(alpha * W) at which slopes are tabulated.


def graded_difference(
    differences: Sequence[float] | NDArray[np.float64], confidence: float, schedule: Sequence[int] = ()
) -> Difference:
    """Return the mean difference of scores in [0, 1], with bounds that hold at all looks together.

    Args:
        differences: Reference minus merge for each document, in [-1, 1], in the order in which they were scored,
            starting with the earliest look. At least 1.
        confidence: One-sided confidence in each direction, over all looks together.
        schedule: Number of documents after each planned look. Empty means a single look at these documents.

    Raises:
        ValueError: If a difference is outside [-1, 1], or if there are more differences than planned.
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
    """Return whether the data refute a mean difference of ``means`` or more.

    The function takes one sample with many hypotheses, or many samples with one hypothesis each.

    Args:
        differences: Differences in the order in which they were scored: ``[n]`` for one sample, ``[samples, n]`` for
            many.
        means: Hypotheses in (-1, 1): ``[means]`` for one sample; a scalar or ``[samples]`` for many.
        confidence: One-sided confidence over all planned looks, in (0, 1).
        schedule: Number of documents after each planned look. ``n`` may be less than the last entry.

    Returns:
        Array of shape ``[means]`` or ``[samples]``.
    """
    alpha = 1 - confidence
    slopes = _slopes(schedule, confidence)
    columns = np.ascontiguousarray(np.atleast_2d(differences).T)  # [n, samples or 1]
    hypotheses = np.broadcast_to(np.asarray(means, dtype=np.float64), np.broadcast_shapes(np.shape(means), (1,)))
    shape = np.broadcast_shapes(hypotheses.shape, columns.shape[1:])
    is_refuted = np.zeros(shape, dtype=bool)
    open_indices = np.arange(shape[0])  # Open hypotheses; betting stops when the target is reached.
    log_wealth = np.full(shape, math.log(alpha / _TARGET_FACTOR))
    hypotheses = np.broadcast_to(hypotheses, shape)
    largest = _MAX_BET_SHARE / (1 - hypotheses)
    per_sample = columns.shape[1] > 1
    # Estimate the standard deviation of a difference before each document.
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
    """Return the number of documents that ``graded_difference`` needs to refute a difference at ``distance``.

    The count has a minimum even if scores hardly vary, because a document that loses everything may not have been
    sampled yet.

    Args:
        variance: Variance of the difference of one document.
        distance: Distance between the mean and the value to refute, above 0.
        confidence: One-sided confidence, in (0, 1).
    """
    distance = min(distance, 0.999)
    # Assume the largest bet on each document. Below a fifth of a point the variance decides anyway.
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
    """Return the lower and upper bound; ``values`` holds float64."""
    differences = np.frombuffer(values)
    return -_upper_bound(-differences, confidence, schedule), _upper_bound(differences, confidence, schedule)


def _upper_bound(values: NDArray[np.float64], confidence: float, schedule: tuple[int, ...]) -> float:
    """Return the smallest grid mean, not below the sample mean, at and above which every mean is refuted."""
    # Only the plan determines the grid. The true mean is above some point of the grid, and the bound misses it only if
    # that point is refuted. Points are slightly below round numbers, so that a bound of 3 points meets a margin of 3.
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
    """Return the bet on each document per standard deviation, by log(``alpha * W``) at ``_LOG_P``, as ``[n, p]``.

    The value ``V`` of the promise is propagated backward from the last look to the first, each time as
    ``P(cross now) + E[value afterward; not crossed]`` for a Brownian motion with variance 1 per document. Before the
    last look only the first term exists, and the slope has a closed form.
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
    """Value of the promise as a function of the current sum; both arrays increase."""

    sums: NDArray[np.float64]
    value: NDArray[np.float64]


def _value(remaining: float, bound: float, documents: int, after: _Value | None) -> _Value:
    """Return the chance to cross ``bound`` after ``remaining`` more documents, or a later bound, by the current sum.

    ``documents`` is the number of documents at the look. The range of sums scales with its square root.
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

"""A bound for graded scores that holds at every number of documents and at all looks at once. Pure functions.

Student's interval of a mean counts on a sample that looks like its population. Graded scores are not kind enough: where
3 % of the documents lose everything and the others gain a little, a sample without such a document looks better *and*
surer than the truth, and a merge at its margin is published in one case of five. What is known for certain is the range
of a score. So the bound is a bet (Waudby-Smith & Ramdas 2024, J. R. Stat. Soc. B 86:1): to refute that the mean
difference is ``m`` or more, a player starts with 1 and stakes on documents coming out below ``m``, one after another::

    W_t = W_(t-1) * (1 + bet_t * (m - D_t)),      D_t in [-1, 1],    0 <= bet_t < 1 / (1 - m)

``bet_t`` may depend on everything before ``t``. While the mean is ``m`` or more, ``W`` cannot be expected to grow, and
the chance that it ever reaches ``1 / alpha`` is at most ``alpha`` (Ville 1939). The bound is the smallest mean at and
above which every mean is refuted, of a grid that is fixed before any document is seen.

The bet decides how wide the bound is, never whether it holds. Ours pays off when a test with normal scores would reject
at one of the planned looks (``tasks.gate.sequential``). Were scores a Brownian motion, the value of that promise would
be ``V(t, S_t)``: the chance that the path ``S`` still crosses a bound. Who owns ``alpha * W = V`` now and stakes the
slope ``d log V / dS`` per standard deviation ends at ``1 / alpha`` exactly on the paths that cross: the bet is read
from the wealth, so it mends what earlier bets have missed (the idea of STaR-Bets, Voráček & Orabona 2025, arXiv
2505.22422, which takes ``sqrt(2 ln(1 / p) / documents left)`` for the slope). At a single look the slope is
``phi(z) / (p * sqrt(documents left))`` with ``p = alpha * W`` and ``z`` its normal quantile. So the bound comes near
the normal one, spends its error as the looks do, and one process serves them all: no look is corrected for a second
time.

Documents must come in the order in which they were scored, which is random and has nothing to do with their scores.
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

_BEYOND = 1.1  # the target is this many times 1 / alpha: a copy in steps stops a little short of what it aims at
_MOST = 0.95  # of the largest bet: no single document may take everything
_PRIOR_VARIANCE = 0.25  # of a difference before any was seen, counted as one document
_LARGEST_BET = 1e3

_LOG_P = np.linspace(math.log(1e-7), math.log(1 - 1e-4), 121)  # of alpha * W, where slopes are tabulated


def graded_difference(
    differences: Sequence[float] | NDArray[np.float64], confidence: float, schedule: Sequence[int] = ()
) -> Difference:
    """Mean of the differences of scores in [0, 1], with bounds that hold at all looks together.

    Args:
        differences: Reference minus merge for each document, in [-1, 1], in the order in which they were scored; at
            least 1. Those of an earlier look come first.
        confidence: One-sided, each way, over all looks together.
        schedule: Documents after each planned look; empty: these are all there will be.

    Raises:
        ValueError: for a difference outside [-1, 1], or more of them than were planned.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    planned = tuple(schedule) or (n,)
    if not (np.abs(values) <= 1).all():
        raise ValueError("differences of scores in [0, 1] lie in [-1, 1]")
    if not 1 <= n <= planned[-1]:
        raise ValueError(f"{n} differences where {planned[-1]} were planned")
    mean = float(values.mean())
    low, high = _bounds(values.tobytes(), confidence, planned)
    variance = float(values.var(ddof=1)) if n > 1 else _PRIOR_VARIANCE
    return Difference(mean, min(low, mean), max(high, mean), variance)


def refuted(
    differences: NDArray[np.float64], means: NDArray[np.float64] | float, confidence: float, schedule: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Whether it is refuted that the mean difference is ``means`` or more; for one sample and many means, or many
    samples at once.

    Args:
        differences: In the order in which they were scored: ``[n]`` for one sample, ``[samples, n]`` for many.
        means: Hypotheses in (-1, 1): ``[means]`` for one sample; one for all, or ``[samples]``, for many.
        schedule: Documents after each planned look; ``n`` may be less than the last.

    Returns:
        ``[means]`` or ``[samples]``.
    """
    alpha = 1 - confidence
    slopes = _slopes(schedule, confidence)
    columns = np.ascontiguousarray(np.atleast_2d(differences).T)  # [n, samples or 1]
    hypotheses = np.broadcast_to(np.asarray(means, dtype=np.float64), np.broadcast_shapes(np.shape(means), (1,)))
    shape = np.broadcast_shapes(hypotheses.shape, columns.shape[1:])
    found = np.zeros(shape, dtype=bool)
    going = np.arange(shape[0])  # which are still open: nobody bets on after the target
    log_wealth = np.full(shape, math.log(alpha / _BEYOND))
    hypotheses = np.broadcast_to(hypotheses, shape)
    largest = _MOST / (1 - hypotheses)
    per_sample = columns.shape[1] > 1
    spread = _spreads(columns)
    target = -math.log(_BEYOND)
    for t in range(len(columns)):
        column, sigma = (columns[t][going], spread[t][going]) if per_sample else (columns[t], spread[t])
        bet = np.minimum(np.interp(log_wealth, _LOG_P, slopes[t]) / sigma, largest)
        log_wealth = log_wealth + np.log1p(bet * (hypotheses - column))
        won = log_wealth >= target
        if won.any():
            found[going[won]] = True
            open_ = ~won
            going, log_wealth = going[open_], log_wealth[open_]
            hypotheses, largest = hypotheses[open_], largest[open_]
            if not len(going):
                break
    return found


def graded_documents_needed(variance: float, distance: float, confidence: float) -> int:
    """``documents_needed`` for ``graded_difference``: however little scores vary, a document that loses everything
    might not have been met.

    Args:
        variance: Of one document's difference.
        distance: Between the mean and what is to be refuted, above 0.
    """
    distance = min(distance, 0.999)
    # With the largest bet on each; below a fifth of a point the variance decides anyway.
    least = math.ceil(-math.log(1 - confidence) / math.log1p(_MOST * distance / (1 - distance)))
    if distance >= 0.002:
        found = range(least, 2 * least + 100)
        shown = bisect_left(found, True, key=lambda n: graded_difference(np.zeros(n), confidence).high <= distance)
        least = found[0] + shown
    return max(least, documents_needed(variance, distance, confidence))


@lru_cache(maxsize=256)  # a verdict asks for the same bounds several times
def _bounds(values: bytes, confidence: float, schedule: tuple[int, ...]) -> tuple[float, float]:
    """Lower and upper bound; ``values`` are float64."""
    differences = np.frombuffer(values)
    return -_upper_bound(-differences, confidence, schedule), _upper_bound(differences, confidence, schedule)


def _upper_bound(values: NDArray[np.float64], confidence: float, schedule: tuple[int, ...]) -> float:
    """The smallest mean of the grid, not below the sample's, at and above which all are refuted."""
    # Fixed by the plan alone: the true mean lies above some point of the grid, and is missed only where that is
    # refuted. A hair below round numbers, so that a margin of 3 points is met by a bound of 3 points.
    steps = 10_000 if schedule[-1] >= 500 else 1_000
    grid = np.arange(-steps, steps) / steps - 1e-9
    above = grid[(grid > values.mean()) & (grid > -1)]
    open_ = np.flatnonzero(~refuted(values, above, confidence, schedule))
    if not len(open_):
        return float(values.mean())
    last = int(open_[-1]) + 1
    return float(above[last]) if last < len(above) else 1.0


def _spreads(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard deviation of a difference as it seems before each document; ``[n, samples]`` like ``columns``."""
    n = len(columns)
    seen = np.arange(n)[:, None]
    before = np.zeros((2, *columns.shape))
    np.cumsum(columns[:-1], axis=0, out=before[0, 1:])
    np.cumsum(columns[:-1] ** 2, axis=0, out=before[1, 1:])
    squares = np.maximum(0.0, before[1] - before[0] ** 2 / np.maximum(seen, 1))
    spreads: NDArray[np.float64] = np.sqrt((_PRIOR_VARIANCE + squares) / (seen + 1))
    return spreads


@lru_cache(maxsize=4)  # 14 MB for 14,042 documents
def _slopes(schedule: tuple[int, ...], confidence: float) -> NDArray[np.float64]:
    """The bet on each document per standard deviation, by the logarithm of ``alpha * W`` at ``_LOG_P``; ``[n, p]``.

    The value ``V`` of the promise is carried back from the last look to the first, each time as
    ``P(cross now) + E[value after it; not crossed]`` for a Brownian motion with a variance of 1 a document. Before the
    last look it is the first term alone, and the slope has a formula.
    """
    from scipy.special import ndtri

    slopes = np.empty((schedule[-1], len(_LOG_P)))
    after: _Value | None = None
    for look, first in reversed(list(zip(plan_looks(schedule, confidence), (0, *schedule), strict=False))):
        bound = normal_quantile(look.confidence) * math.sqrt(look.documents)
        span = look.documents - first
        left = np.arange(span, 0, -1, dtype=np.float64)  # documents to the look, before each one
        if after is None:
            z = ndtri(np.exp(_LOG_P))
            steepness = np.exp(-0.5 * z**2 - _LOG_P)[None, :] / math.sqrt(2 * math.pi)
        else:
            knots = np.unique(np.geomspace(1, span, 24).round())
            steepness = _between(
                np.log(left),
                np.log(knots),
                np.stack(
                    [_steepness(_value(float(knot), bound, look.documents, after)) * math.sqrt(knot) for knot in knots]
                ),
            )
        slopes[first : look.documents] = np.clip(steepness / np.sqrt(left)[:, None], 0.0, _LARGEST_BET)
        after = _value(float(span), bound, look.documents, after)
    return slopes


class _Value(NamedTuple):
    """The value of the promise by the sum so far; both rise."""

    sums: NDArray[np.float64]
    value: NDArray[np.float64]


def _steepness(promise: _Value) -> NDArray[np.float64]:
    """``d log V / dS`` at ``_LOG_P``."""
    height = np.log(promise.value)
    slopes: NDArray[np.float64] = np.interp(_LOG_P, height, np.gradient(height, promise.sums))
    return slopes


def _between(at: NDArray[np.float64], knots: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows between the rows of a table, linearly; ``[at, columns]``."""
    if len(knots) == 1:
        return np.repeat(rows, len(at), axis=0)
    lower = np.clip(np.searchsorted(knots, at, side="right") - 1, 0, len(knots) - 2)
    share = ((at - knots[lower]) / (knots[lower + 1] - knots[lower]))[:, None]
    mixed: NDArray[np.float64] = (1 - share) * rows[lower] + share * rows[lower + 1]
    return mixed


def _value(left: float, bound: float, documents: int, after: _Value | None) -> _Value:
    """The chance to cross ``bound`` after ``left`` more documents, or a later bound, by the sum so far.

    Args:
        documents: At the look; what sums may be goes with its square root.
        after: The value behind this look; None for the last.
    """
    from scipy.special import ndtr

    root = math.sqrt(left)
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
    kept = (value > 1e-14) & (value < 1) & (np.diff(value, prepend=0.0) > 0)
    return _Value(sums[kept], value[kept])

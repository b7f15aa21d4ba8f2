"""Plan interim looks: compute the confidence of each look such that all of them together err no more often than one.

The gate may judge a task after 500 documents and, if they do not decide, after 1,000, 2,000, ... up to all documents of
the task. Five looks at 95 % each would err three times as often as one. The allowed error is therefore *spent* over the
looks by a function that is fixed in advance (Lan & DeMets 1983, Biometrika 70:659)::

    spent(t) = alpha * t**2         with t the share of the task's documents that are scored, alpha = 1 - confidence

The bound of each look is such that the probability of crossing it, and no earlier bound, equals the error that becomes
available at this look. It is computed by the recursion of Armitage, McPherson & Rowe (1969, J. R. Stat. Soc. A 132:235)
for a normal mean. The intervals at these levels are *repeated confidence intervals* (Jennison & Turnbull 1989, J. R.
Stat. Soc. B 51:305). All of them together cover with the requested confidence, so the gate may stop at any look, for
any reason.

The exponent 2 is a compromise (Kim & DeMets 1987, Biometrika 74:149; see ``dev/statistics/interim-looks.md``). With
1, more decisions come early, but the last look is weaker. Larger exponents, like O'Brien & Fleming's bounds, save
hardly any documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from pydantic import BaseModel, ConfigDict

EXPONENT = 2.0  # Exponent of the spending function.
FUTILE = 0.02  # mergegate stops evaluating documents if the chance of a decision is below this.

_NEARLY_SURE = 1 - 1e-12  # A probability of 1 has no quantile.
_leggauss = cache(np.polynomial.legendre.leggauss)  # Cached because computing the nodes takes a while.
_FAR = 9.0  # Standard deviations beyond which a normal density is negligible.


class InterimLook(BaseModel):
    """One interim look at a task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int  # From 1.
    of: int
    documents: int  # Number of documents scored by this look.
    confidence: float  # One-sided confidence of an interval at this look, in (0.5, 1).


def plan_looks(schedule: Sequence[int], confidence: float) -> tuple[InterimLook, ...]:
    """Return every look of a schedule with its own confidence. A single look has ``confidence``.

    Args:
        schedule: Number of documents after each look, increasing up to all documents.
        confidence: One-sided confidence of all looks together, in (0.5, 1).
    """
    if not schedule or schedule[0] < 1 or any(b <= a for a, b in pairwise(schedule)):
        raise ValueError(f"looks after {schedule} documents: the numbers must increase, from at least 1")
    levels = look_levels(tuple(documents / schedule[-1] for documents in schedule), confidence)
    return tuple(
        InterimLook(number=number, of=len(levels), documents=documents, confidence=level)
        for number, (documents, level) in enumerate(zip(schedule, levels, strict=True), start=1)
    )


def error_at_look(schedule: Sequence[int], documents: int, error: float) -> float:
    """Return the part of ``error`` that becomes available at one look. The parts of all looks sum to ``error``.

    A test that spends this part at each look is valid whatever the dependence between its looks (Bonferroni), also if
    it uses only some of the documents.

    Args:
        schedule: Number of documents after each planned look.
        documents: Number of documents after the current look, one of ``schedule``.
        error: Error that all looks together may make.
    """
    before = max((end for end in schedule if end < documents), default=0)
    share, share_before = documents / schedule[-1], before / schedule[-1]
    return error * (math.pow(share, EXPONENT) - math.pow(share_before, EXPONENT))


@lru_cache(maxsize=1024)
def look_levels(shares: tuple[float, ...], confidence: float) -> tuple[float, ...]:
    """Return the one-sided confidence of each look, given ``confidence`` for all looks together.

    ``shares`` holds the share of the information that is available at each look, increasing to 1.
    """
    if len(shares) == 1:
        return (confidence,)
    spent = [(1 - confidence) * share**EXPONENT for share in shares]
    return tuple(min(NormalDist().cdf(bound), _NEARLY_SURE) for bound in _bounds(shares, spent))


def _bounds(shares: Sequence[float], spent_alpha: Sequence[float]) -> list[float]:
    """Return the bound on the z statistic of each look. It is crossed first at this look with the probability to spend.

    The sum ``S = z * sqrt(share)`` is a Brownian motion. Gauss-Legendre nodes below the last bound represent the
    density of the paths that have crossed no bound so far.
    """
    from scipy.special import ndtr

    bounds: list[float] = []
    all_nodes, weights = _leggauss(400)
    nodes, mass = np.zeros(1), np.ones(1)  # Before the first look S is 0; mass is density times weight.
    last_share, spent_before = 0.0, 0.0
    for share, spent_until in zip(shares, spent_alpha, strict=True):
        step = math.sqrt(share - last_share)
        # Find by bisection the value that the next sum exceeds with the probability to spend.
        bound_from, bound_to = -_FAR, _FAR + float(nodes.max())
        for _ in range(60):
            middle = (bound_from + bound_to) / 2
            is_exceeded = float(mass @ ndtr((nodes - middle) / step)) > spent_until - spent_before
            bound_from, bound_to = (middle, bound_to) if is_exceeded else (bound_from, middle)
        bound = (bound_from + bound_to) / 2
        bounds.append(bound / math.sqrt(share))
        low = -_FAR * math.sqrt(share)
        new_nodes = low + (bound - low) * (all_nodes + 1) / 2
        kernel = np.exp(-0.5 * ((new_nodes[:, None] - nodes) / step) ** 2) / (step * math.sqrt(2 * math.pi))
        nodes, mass = new_nodes, (kernel @ mass) * weights * (bound - low) / 2
        last_share, spent_before = share, spent_until
    return bounds


def chance_to_decide(drop: float, error: float, share: float, pass_below: float, fail_above: float) -> float:
    """Return the probability that the remaining documents decide, given only the documents so far.

    The estimate at the last look is predicted as normal around ``drop``. Its squared error is the part that remains
    between this look and the last.

    Args:
        drop: Drop observed so far.
        error: Standard error of the drop, in the same unit.
        share: Share of all documents that has been scored, in (0, 1).
        pass_below: Largest estimate at the last look that passes.
        fail_above: Smallest estimate at the last look that fails, if it is above ``pass_below``.
    """
    last_estimate = NormalDist(drop, max(error, 1e-12) * math.sqrt(1 - share))
    return last_estimate.cdf(pass_below) + 1 - last_estimate.cdf(max(fail_above, pass_below))

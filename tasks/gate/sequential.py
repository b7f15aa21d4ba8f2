"""Looking more than once: how sure each look must be, so that all of them together err no more often than one.

A task may be judged after 500 documents, and where they do not decide, after 1,000, 2,000, ... up to all it has. Asked
each time at 95 %, five looks would err three times as often as one. So the error that is allowed is *spent* over the
looks by a function fixed beforehand (Lan & DeMets 1983, Biometrika 70:659)::

    spent(t) = alpha * t**2         with t the share of the task's documents that have been seen, alpha = 1 - confidence

Each look gets the part that is new, and the exact bound that spends it: what crosses at this look and at none before,
by the recursion of Armitage, McPherson & Rowe (1969, J. R. Stat. Soc. A 132:235) for a normal mean. The intervals taken
at these levels are *repeated confidence intervals* (Jennison & Turnbull 1989, J. R. Stat. Soc. B 51:305): all of them
cover at once with the confidence that was asked for, so it does not matter which look stops, or why.

The exponent is a choice (Kim & DeMets 1987, Biometrika 74:149). With 1, early looks decide more and the last one pays
for it; like O'Brien & Fleming's, larger ones save hardly any documents. ``docs/gates.md`` shows what 2 does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput

EXPONENT = 2.0  # of the spending function
FUTILE = 0.02  # chance to decide below which no more documents are asked for

_NEARLY_SURE = 1 - 1e-12  # certainty has no quantile
_FAR = 9.0  # standard deviations beyond which a normal density is nothing


class InterimLook(BaseModel):
    """One of the looks that are taken at a task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int  # from 1
    of: int
    documents: int  # seen so far, at this look
    confidence: float  # one-sided, of an interval taken at this look, in (0.5, 1)


def plan_looks(schedule: Sequence[int], confidence: float) -> tuple[InterimLook, ...]:
    """Every look of a schedule with its own confidence. A single look has the one that was asked for.

    Args:
        schedule: Documents after each look, rising; the last is all there are.
        confidence: One-sided, that all looks together have; in (0.5, 1).
    """
    if not schedule or schedule[0] < 1 or any(b <= a for a, b in pairwise(schedule)):
        raise ValueError(f"looks after {schedule} documents: numbers must rise from at least 1")
    levels = look_levels(tuple(documents / schedule[-1] for documents in schedule), confidence)
    return tuple(
        InterimLook(number=number, of=len(levels), documents=documents, confidence=level)
        for number, (documents, level) in enumerate(zip(schedule, levels, strict=True), start=1)
    )


def look_at(documents: int, schedule: Sequence[int], confidence: float, where: str) -> InterimLook:
    """The look that has been reached with so many documents.

    Args:
        where: What messages call the task.

    Raises:
        InvalidInput: when no look was planned there: stopping where it suits is what the plan is to prevent.
    """
    for look in plan_looks(schedule, confidence):
        if look.documents == documents:
            return look
    raise InvalidInput(
        where,
        found=f"{documents:,} documents scored",
        expected=f"as many as at a planned look: {', '.join(f'{planned:,}' for planned in schedule)}",
        remedy="evaluate up to the next look",
    )


@lru_cache(maxsize=1024)
def look_levels(shares: tuple[float, ...], confidence: float) -> tuple[float, ...]:
    """One-sided confidence of the interval that is taken at each look.

    Args:
        shares: Of the information that has been seen at each look, rising to 1.
        confidence: That all looks together have.
    """
    if len(shares) == 1:
        return (confidence,)
    spent = [(1 - confidence) * share**EXPONENT for share in shares]
    return tuple(min(NormalDist().cdf(bound), _NEARLY_SURE) for bound in _bounds(shares, spent))


def _bounds(shares: Sequence[float], spent: Sequence[float]) -> list[float]:
    """Bounds on the z statistic of each look that are crossed for the first time with the probabilities to be spent.

    The sum ``S = z * sqrt(share)`` is a Brownian motion. Its density among paths that crossed nowhere is carried from
    look to look on Gauss-Legendre nodes below the last bound.
    """
    bounds: list[float] = []
    all_nodes, weights = _quadrature()
    nodes, mass = np.zeros(1), np.ones(1)  # before the first look S is 0; mass is density times weight
    before, spent_before = 0.0, 0.0
    for share, so_far in zip(shares, spent, strict=True):
        step = math.sqrt(share - before)
        bound = _crossed_with(so_far - spent_before, nodes, mass, step)
        bounds.append(bound / math.sqrt(share))
        low = -_FAR * math.sqrt(share)
        fresh = low + (bound - low) * (all_nodes + 1) / 2
        kernel = np.exp(-0.5 * ((fresh[:, None] - nodes) / step) ** 2) / (step * math.sqrt(2 * math.pi))
        nodes, mass = fresh, (kernel @ mass) * weights * (bound - low) / 2
        before, spent_before = share, so_far
    return bounds


@lru_cache(maxsize=1)
def _quadrature() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nodes and weights of Gauss and Legendre on [-1, 1]. Made when they are first needed: it takes a while."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    return nodes, weights


def _crossed_with(probability: float, nodes: NDArray[np.float64], mass: NDArray[np.float64], step: float) -> float:
    """Where the next sum lies above with ``probability``, by bisection."""
    from scipy.special import ndtr

    low, high = -_FAR, _FAR + float(nodes.max())
    for _ in range(60):
        middle = (low + high) / 2
        above = float(mass @ ndtr((nodes - middle) / step))
        low, high = (middle, high) if above > probability else (low, middle)
    return (low + high) / 2


def chance_to_decide(drop: float, error: float, share: float, pass_below: float, fail_above: float) -> float:
    """How likely the documents that are left decide what these have not, whatever the true drop is.

    The predictive distribution of the last look's estimate, with nothing known of the true drop but what was seen:
    normal around ``drop`` with the squared error that goes from this look to the last.

    Args:
        drop: Seen so far.
        error: Its standard error, in the same unit.
        share: Of all documents, that has been seen; in (0, 1).
        pass_below, fail_above: What the last look's estimate must be.
    """
    to_come = NormalDist(drop, max(error, 1e-12) * math.sqrt(1 - share))
    return to_come.cdf(pass_below) + 1 - to_come.cdf(max(fail_above, pass_below))

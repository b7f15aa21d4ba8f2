"""What the confirmation can show, said before the search: which gains it would confirm, and how likely. Pure functions.

Known are how many documents there will be and how much the numbers of hand-written recipes vary from document to
document. How alike winner and reference will be is not known: an assumption, and said with the answer. For right or
wrong it is the tetrachoric correlation, of what lies behind being right (Pearson 1900); for other numbers the ordinary
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from mergegate.tasks.gate import POWER, normal_quantile
from mergegate.tasks.sweep.objective import Objective
from mergegate.tasks.sweep.trials import MetricKey, Sheet

CORRELATION = 0.6  # of two recipes of one family, on the same documents
_POINTS = (0.01, 0.02, 0.03, 0.05, 0.1)  # gains that are spoken of, where numbers are shares
_TIMES = (0.25, 0.5, 1.0, 2.0)  # elsewhere: of the gain that is found 4 times in 5


class GainChance(BaseModel):
    """A true gain, as scores are, and the chance that it is confirmed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gain: float
    chance: float


class ConfirmationPower(BaseModel):
    """What the confirmation can show."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int  # of all tasks together
    detectable: float  # the smallest true gain that is confirmed 4 times in 5
    chances: tuple[GainChance, ...]
    confidence: float
    correlation: float
    in_points: bool  # gains are shares

    def brief(self) -> str:
        """``1,200 held-out documents confirm a gain of 2.1 points 4 times in 5``."""
        return f"{self.documents:,} held-out documents confirm a gain of {self._said(self.detectable)} 4 times in 5"

    def sentence(self) -> str:
        """``1,200 held-out documents confirm a gain of 2.1 points 4 times in 5 (of 1.0 points in 31 %, ...)``."""
        said = ", ".join(f"of {self._said(one.gain)} in {100 * one.chance:.0f} %" for one in self.chances)
        alike = f"winner and hand-written recipe correlate by {self.correlation:g} over documents"
        return f"{self.brief()} ({said}), if {alike}"

    def _said(self, gain: float) -> str:
        return f"{100 * gain:.1f} points" if self.in_points else f"{gain:.2g}"


def confirmation_power(
    objective: Objective,
    sheets: Sequence[Sheet],
    documents: Mapping[MetricKey, int],
    confidence: float,
    correlation: float = CORRELATION,
) -> ConfirmationPower:
    """What so many documents can confirm.

    Args:
        sheets: Of hand-written recipes, on the documents of the search; at least one.
        documents: Of the confirmation, of each (task, measure).
        confidence: One-sided, of the test.
        correlation: Of winner and reference over documents, in [0, 1).
    """
    squared = 0.0
    for term in objective.terms:
        spreads = [difference_variance(term.numbers(sheet), correlation) for sheet in sheets]
        squared += term.weight**2 * sum(spreads) / len(spreads) / documents[term.asked]
    error, sure = max(math.sqrt(squared), 1e-12), normal_quantile(confidence)
    detectable = (sure + normal_quantile(POWER)) * error
    in_points = all(term.asked.measure in ("exact", "probability") for term in objective.terms)
    gains = _POINTS if in_points else tuple(times * detectable for times in _TIMES)
    return ConfirmationPower(
        documents=sum({asked.task: documents[asked] for asked in objective.weights}.values()),
        detectable=detectable,
        chances=tuple(GainChance(gain=gain, chance=NormalDist().cdf(gain / error - sure)) for gain in gains),
        confidence=confidence,
        correlation=correlation,
        in_points=in_points,
    )


def difference_variance(numbers: NDArray[np.float64], correlation: float) -> float:
    """Variance of one document's difference between two recipes that are as good as this one."""
    n = len(numbers)
    if not np.isin(numbers, (0.0, 1.0)).all():
        return 2 * (1 - correlation) * float(numbers.var())
    # Where all are right, one more document might not have been.
    right = min(max(float(numbers.mean()), 1 / (n + 2)), 1 - 1 / (n + 2))
    return 2 * (right - both_right(right, correlation))


def both_right(right: float, correlation: float) -> float:
    """Chance that two recipes are right where each is with ``right``: ``P(X < h, Y < h)`` of a normal pair."""
    h = NormalDist().inv_cdf(right)
    x = np.linspace(-9.0, h, 401)
    given = [NormalDist().cdf(at) for at in (h - correlation * x) / math.sqrt(1 - correlation**2)]
    return float(np.trapezoid(np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi) * given, x))

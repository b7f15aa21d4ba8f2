"""Forecast before the search which gains the confirmation can detect, and with what chance.

The forecast uses the number of confirmation documents, and the variance of the hand-written recipes' scores. It assumes
a correlation between the scores of winner and reference, and states it. For right or wrong answers this is the
tetrachoric correlation (Pearson 1900), that of the latent variables behind the answers. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np
from pydantic import BaseModel, ConfigDict

from mergegate.tasks.gate import POWER, normal_quantile
from mergegate.tasks.sweep.objective import MetricKey, Objective, ScoresByMetric

CORRELATION = 0.6  # assumed between the scores of two recipes on the same documents
_SHARE_GAINS = (0.01, 0.02, 0.03, 0.05, 0.1)  # gains in the forecast if scores are shares
_GAIN_MULTIPLES = (0.25, 0.5, 1.0, 2.0)  # for other scores, as multiples of ``detectable``


class GainChance(BaseModel):
    """True gain, in the unit of the scores, and the chance that the test confirms it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gain: float
    chance: float


class ConfirmationPower(BaseModel):
    """Forecast of the gains that the confirmation can detect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int  # of all tasks together
    detectable: float  # smallest true gain that is confirmed with 80 % probability
    chances: tuple[GainChance, ...]
    confidence: float
    correlation: float
    in_points: bool  # whether gains are shares

    def brief(self) -> str:
        """Return ``1,200 held-out documents confirm a true lead of 2.1 points 80 % of the time``."""
        lead = self._format(self.detectable)
        return f"{self.documents:,} held-out documents confirm a true lead of {lead} {100 * POWER:g} % of the time"

    def sentence(self) -> str:
        """Return :meth:`brief` with the chances of other gains and the assumed correlation.

        Example: ``1,200 held-out documents confirm a true lead of 2.1 points 80 % of the time (1.0 points: 31 %)``.
        """
        chances = ", ".join(f"{self._format(item.gain)}: {100 * item.chance:.0f} %" for item in self.chances)
        assumption = f"the scores of winner and hand-written recipe have a correlation of {self.correlation:g}"
        return f"{self.brief()} ({chances}), if {assumption}"

    def _format(self, gain: float) -> str:
        return f"{100 * gain:.1f} points" if self.in_points else f"{gain:.2g}"


def confirmation_power(
    objective: Objective,
    tables: Sequence[ScoresByMetric],
    documents: Mapping[MetricKey, int],
    confidence: float,
    correlation: float = CORRELATION,
) -> ConfirmationPower:
    """Return the forecast for a confirmation with the given number of documents.

    Args:
        objective: Objective to confirm.
        tables: Scores of the hand-written recipes on the documents of the search. At least one.
        documents: Number of confirmation documents by metric.
        confidence: One-sided confidence of the test.
        correlation: Correlation between the scores of winner and reference, in [0, 1). Default: ``CORRELATION``.
    """
    squared = 0.0
    for term in objective.terms:
        # For each hand-written recipe, the variance of a document's difference between two recipes that are as good.
        variances = []
        for numbers in (term.numbers(table) for table in tables):
            if np.isin(numbers, (0.0, 1.0)).all():
                # Keep the rate away from 0 and 1, because the next answer could differ even if all answers agree.
                least = 1 / (len(numbers) + 2)
                right = min(max(float(numbers.mean()), least), 1 - least)
                variances.append(2 * (right - both_right(right, correlation)))
            else:
                variances.append(2 * (1 - correlation) * float(numbers.var()))
        squared += term.weight**2 * sum(variances) / len(variances) / documents[term.key]
    error, normal_bound = max(math.sqrt(squared), 1e-12), normal_quantile(confidence)
    detectable = (normal_bound + normal_quantile(POWER)) * error
    in_points = all(term.key.measure in ("exact", "probability") for term in objective.terms)
    gains = _SHARE_GAINS if in_points else tuple(multiple * detectable for multiple in _GAIN_MULTIPLES)
    return ConfirmationPower(
        documents=sum({key.task: documents[key] for key in objective.weights}.values()),
        detectable=detectable,
        chances=tuple(GainChance(gain=gain, chance=NormalDist().cdf(gain / error - normal_bound)) for gain in gains),
        confidence=confidence,
        correlation=correlation,
        in_points=in_points,
    )


def both_right(right: float, correlation: float) -> float:
    """Return the chance that two recipes are both right about a document if each is with probability ``right``.

    It is ``P(X < h, Y < h)`` for correlated standard normal variables with ``P(X < h) = right``.
    """
    h = NormalDist().inv_cdf(right)
    x = np.linspace(-9.0, h, 401)
    conditional = [NormalDist().cdf(bound) for bound in (h - correlation * x) / math.sqrt(1 - correlation**2)]
    return float(np.trapezoid(np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi) * conditional, x))

"""What judged pairs show about a candidate, whenever one looks, and what follows from it. Pure functions.

A judged pair is ``x = 1, 1/2`` or ``0``: in both orders the candidate's answer was better, neither was, or the
parent's was. The win rate is the mean of ``x``. To be promoted it must be shown to be above ``m = 1/2 - margin``.
Somebody who doubts it offers bets that are fair or worse as long as it is not; we take 32 of them at once, from careful
to bold, with an equal part of 1 on each (Waudby-Smith & Ramdas 2024, J. R. Stat. Soc. B 86:1)::

    E(m) = 1/32 * sum_k  prod_i (1 + b_k (x_i - m)),      b_k = (k - 1/2) / 32 * 1 / (2 m),      k = 1 ... 32

As long as the win rate is ``m`` or less, ``E`` cannot be expected to grow from any pair to the next, and the chance
that it *ever* reaches ``1 / alpha`` is at most ``alpha`` (Ville 1939, Etude critique de la notion de collectif). So it
may be looked at after every pair, and watching may end or go on at will. Each product depends on the numbers of wins,
ties and losses alone, never on their order: ``E`` of a million pairs is 32 sums of three terms.

The mirrored bets (``1 - x`` for ``x``) show that the win rate is below even. Each factor is
``1 + (k - 1/2) / 64 * (x / m - 1)`` and falls as ``m`` rises, and so does ``E(m)``: the win rates that are not refuted
are an interval, whose ends bisection finds. Each end holds at all times at once with the confidence of the rule, and
agrees with the decision: the lower one is at or above ``m`` exactly when ``E(m)`` has reached ``1 / alpha``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

EVEN = 0.5
BETS = 32
_SHARES = (np.arange(BETS) + 0.5) / BETS / 2  # of the largest bet that could lose everything: never more than half
_HALVINGS = 50  # of the interval [0, 1]: finer than a float64 near 1/2 needs
_POINTS = 400  # of a plot


class ShadowRule(BaseModel):
    """When a candidate that is watched is promoted or rolled back, in a profile under ``shadow: rule``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    margin: float = Field(
        default=3.0, gt=0, lt=50, description="Points of win rate below even that a promoted candidate may have."
    )
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1, description="That neither decision is wrong, each for itself, over all looks."
    )
    minimum_hours: float = Field(
        default=24.0, ge=0, description="Hours it is watched before it is promoted: a whole day's users."
    )
    minimum_pairs: int = Field(default=100, ge=1, description="Judged pairs before it is promoted.")
    pairs_per_look: int = Field(default=200, ge=1, description="Most pairs that are judged in one look.")

    @property
    def bound(self) -> float:
        """Win rate that a candidate must be shown to be above."""
        return EVEN - self.margin / 100

    @property
    def log_threshold(self) -> float:
        """Logarithm of the evidence that decides: ``1 / alpha``."""
        return -math.log1p(-self.confidence)


class ShadowEvidence(BaseModel):
    """What the pairs that are judged so far show.

    Attributes:
        win_rate: Wins and half of the ties, of all pairs; even before the first.
        log_e_promote: Of the evidence that the win rate is above the rule's bound.
        log_e_rollback: Of the evidence that it is below even.
        low, high: The win rate is above ``low`` at all looks with the rule's confidence, and so is it below ``high``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pairs: int
    wins: int
    ties: int
    losses: int
    win_rate: float
    log_e_promote: float
    log_e_rollback: float
    low: float
    high: float


class ShadowDecision(NamedTuple):
    """What follows, and why in a sentence."""

    outcome: Literal["promote", "roll back", "wait"]
    reason: str


def log_evidence(wins: ArrayLike, ties: ArrayLike, losses: ArrayLike, bound: ArrayLike) -> NDArray[np.float64]:
    """Logarithm of the evidence that the win rate is above ``bound``; exchange wins and losses and take
    ``1 - bound`` for the evidence that it is below.

    Args:
        wins, ties, losses: Numbers of pairs, of any shape.
        bound: In (0, 1); of a shape that fits to theirs.
    """
    m = np.asarray(bound, dtype=np.float64)[..., None]
    stakes = _SHARES / m
    logs = np.asarray(wins, dtype=np.float64)[..., None] * np.log1p(stakes * (1 - m))
    logs = logs + np.asarray(ties, dtype=np.float64)[..., None] * np.log1p(stakes * (EVEN - m))
    logs = logs + np.asarray(losses, dtype=np.float64)[..., None] * np.log1p(-_SHARES)
    top = logs.max(axis=-1)
    mean: NDArray[np.float64] = top + np.log(np.exp(logs - top[..., None]).mean(axis=-1))
    return mean


def evidence_of(scores: Sequence[float], rule: ShadowRule) -> ShadowEvidence:
    """What judged pairs show.

    Args:
        scores: Of each pair 1 (the candidate won), 1/2 or 0.

    Raises:
        ValueError: for another score.
    """
    wins, ties, losses = (np.array([np.count_nonzero(kind)], dtype=np.int64) for kind in _kinds(scores))
    return _evidence(wins, ties, losses, rule)[0]


def evidence_path(scores: Sequence[float], rule: ShadowRule, points: int = _POINTS) -> tuple[ShadowEvidence, ...]:
    """How the evidence grew, for a plot: after at most ``points`` numbers of pairs, evenly apart, the last among them.

    Args:
        scores: Of each pair 1, 1/2 or 0, in the order in which they were judged.

    Raises:
        ValueError: for another score.
    """
    if not len(scores):
        return ()
    at = np.unique(np.linspace(1, len(scores), min(points, len(scores))).round().astype(np.int64)) - 1
    wins, ties, losses = (np.cumsum(kind, dtype=np.int64)[at] for kind in _kinds(scores))
    return _evidence(wins, ties, losses, rule)


def decide_shadow(evidence: ShadowEvidence, hours_watched: float, rule: ShadowRule) -> ShadowDecision:
    """What follows from the evidence as it is now.

    A candidate that is shown to be worse than even is rolled back at once, also where it is shown to be within the
    margin: who is known to be worse is not promoted.
    """
    seen = _seen(evidence)
    sure = f"{100 * rule.confidence:.4g} % confidence"
    if evidence.log_e_rollback >= rule.log_threshold:
        shown = f"{seen}; with {sure} it is below {_percent(evidence.high)}, worse than even"
        return ShadowDecision("roll back", shown)
    missing = _missing(evidence, hours_watched, rule)
    if evidence.log_e_promote >= rule.log_threshold:
        shown = f"{seen}; with {sure} it is above {_percent(evidence.low)}, within {rule.margin:g} points of even"
        return ShadowDecision("wait", f"{shown}, but {missing}") if missing else ShadowDecision("promote", shown)
    if not evidence.pairs:
        return ShadowDecision("wait", "no pair is judged yet")
    open_still = f"{seen}; it may be anything from {_percent(evidence.low)} to {_percent(evidence.high)}"
    wanted = f"above {_percent(rule.bound)} is to be shown"
    return ShadowDecision("wait", f"{open_still}, and {wanted}" + (f"; besides, {missing}" if missing else ""))


def _missing(evidence: ShadowEvidence, hours: float, rule: ShadowRule) -> str:
    """Which minimum a promotion still waits for; empty: none."""
    missing = []
    if evidence.pairs < rule.minimum_pairs:
        missing.append(f"{evidence.pairs:,} of at least {rule.minimum_pairs:,} pairs are judged")
    if hours < rule.minimum_hours:
        missing.append(f"{math.floor(10 * hours) / 10:g} of at least {rule.minimum_hours:g} hours are watched")
    return " and ".join(missing)


def _seen(evidence: ShadowEvidence) -> str:
    return f"the win rate over {evidence.pairs:,} pairs is {_percent(evidence.win_rate)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _kinds(scores: Sequence[float]) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Which pairs were won, tied and lost."""
    values = np.asarray(scores, dtype=np.float64)
    kinds = values == 1, values == EVEN, values == 0
    if not np.logical_or.reduce(kinds).all():
        raise ValueError("a judged pair is 1, 1/2 or 0")
    return kinds


def _evidence(
    wins: NDArray[np.int64], ties: NDArray[np.int64], losses: NDArray[np.int64], rule: ShadowRule
) -> tuple[ShadowEvidence, ...]:
    pairs = wins + ties + losses
    rates = np.where(pairs > 0, (wins + ties / 2) / np.maximum(pairs, 1), EVEN)
    promote = log_evidence(wins, ties, losses, rule.bound)
    rollback = log_evidence(losses, ties, wins, EVEN)
    low = _refuted_up_to(wins, ties, losses, rule.log_threshold)
    high = 1 - _refuted_up_to(losses, ties, wins, rule.log_threshold)
    return tuple(
        ShadowEvidence(
            pairs=int(pairs[i]),
            wins=int(wins[i]),
            ties=int(ties[i]),
            losses=int(losses[i]),
            win_rate=float(rates[i]),
            log_e_promote=float(promote[i]),
            log_e_rollback=float(rollback[i]),
            low=float(low[i]),
            high=float(high[i]),
        )
        for i in range(len(pairs))
    )


def _refuted_up_to(
    wins: NDArray[np.int64], ties: NDArray[np.int64], losses: NDArray[np.int64], log_threshold: float
) -> NDArray[np.float64]:
    """The largest win rate that is refuted, from below; 0 where none is."""
    low, high = np.zeros(len(wins)), np.ones(len(wins))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        refuted = log_evidence(wins, ties, losses, middle) >= log_threshold
        low, high = np.where(refuted, middle, low), np.where(refuted, high, middle)
    return low

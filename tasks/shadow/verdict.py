"""Decide on a watched candidate: apply the kill switch first, then the evidence from the judged pairs, at any look.

The functions are pure. The result converts to the common verdict (``stage.Verdict``): ``promote`` passes,
``roll back`` and ``kill`` fail, and ``wait`` is inconclusive.

A judged pair has the score ``x = 1`` if the candidate's answer was better in both orders, ``0`` if the parent's was,
and ``1/2`` in all other cases. The win rate is the mean of ``x``. A candidate is promoted when its win rate is shown to
be above ``m = 1/2 - margin``. The test bets against the null hypothesis that the win rate is ``m`` or less, under which
every bet is fair or worse. It splits a capital of 1 equally over 32 bets, from cautious to bold (Waudby-Smith & Ramdas
2024, J. R. Stat. Soc. B 86:1)::

    E(m) = 1/32 * sum_k  prod_i (1 + b_k (x_i - m)),      b_k = (k - 1/2) / 32 * 1 / (2 m),      k = 1 ... 32

Under the null hypothesis, the expected value of ``E`` does not grow from one pair to the next, and the probability that
``E`` *ever* reaches ``1 / alpha`` is at most ``alpha`` (Ville 1939, Etude critique de la notion de collectif). So the
test may run after every pair, and watching may stop or continue at any time. Each product depends only on the numbers
of wins, ties and losses, not on their order, so ``E`` of a million pairs takes 32 sums of three terms.

The mirrored bets (``1 - x`` for ``x``) show that the win rate is below even. Each factor is
``1 + (k - 1/2) / 64 * (x / m - 1)``, which falls as ``m`` rises, and so does ``E(m)``. The win rates that are not
refuted therefore form an interval, and bisection finds its ends. Each end is valid at all times simultaneously with the
rule's confidence. The ends agree with the decision: the lower end is at or above ``m`` exactly when ``E(m)`` has
reached ``1 / alpha``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mergegate.tasks.base.stage import Outcome, Section, Verdict
from mergegate.tasks.quality.judge import ControlResult, JudgeRule
from mergegate.tasks.shadow.arms import ArmComparison, ArmRow, compare_arms, error_rate, kill_reason
from mergegate.tasks.shadow.settings import FrozenModel, ShadowRule, ShadowSettings

EVEN = 0.5
BETS = 32
# Fractions of the largest possible bet, which could lose everything: at most half.
_SHARES = (np.arange(BETS) + 0.5) / BETS / 2
_HALVINGS = 50  # bisection steps on [0, 1]: finer than float64 precision near 1/2
_POINTS = 400  # points of a plot


class ShadowEvidence(FrozenModel):
    """Evidence from the pairs judged so far."""

    pairs: int
    wins: int  # of the candidate
    ties: int
    losses: int
    win_rate: float  # wins plus half of the ties, divided by all pairs; 1/2 before the first pair
    log_e_promote: float  # logarithm of the evidence that the win rate is above the rule's bound
    log_e_rollback: float  # logarithm of the evidence that the win rate is below even (1/2)
    low: float  # bounds of the win rate, valid at all interim looks with the rule's confidence
    high: float


class ShadowDecision(NamedTuple):
    """Decision on a candidate, with its reason as a sentence."""

    outcome: Literal["promote", "roll back", "wait"]
    reason: str


def log_evidence(wins: ArrayLike, ties: ArrayLike, losses: ArrayLike, rate_bound: ArrayLike) -> NDArray[np.float64]:
    """Return the logarithm of the evidence that the win rate is above ``rate_bound``, which is in (0, 1).

    The numbers of wins, ties and losses have the same shape, and ``rate_bound`` broadcasts with it. For the evidence
    that the win rate is below ``rate_bound``, exchange wins and losses and pass ``1 - rate_bound``.
    """
    m = np.asarray(rate_bound, dtype=np.float64)[..., None]
    stakes = _SHARES / m
    logs = np.asarray(wins, dtype=np.float64)[..., None] * np.log1p(stakes * (1 - m))
    logs = logs + np.asarray(ties, dtype=np.float64)[..., None] * np.log1p(stakes * (EVEN - m))
    logs = logs + np.asarray(losses, dtype=np.float64)[..., None] * np.log1p(-_SHARES)
    top = logs.max(axis=-1)
    mean: NDArray[np.float64] = top + np.log(np.exp(logs - top[..., None]).mean(axis=-1))
    return mean


def evidence_of(scores: Sequence[float], rule: ShadowRule) -> ShadowEvidence:
    """Return the evidence from the scores of judged pairs: 1 (the candidate won), 1/2 or 0."""
    wins, ties, losses = (np.array([np.count_nonzero(kind)], dtype=np.int64) for kind in _outcome_masks(scores))
    return _evidence(wins, ties, losses, rule)[0]


def evidence_path(scores: Sequence[float], rule: ShadowRule, points: int = _POINTS) -> tuple[ShadowEvidence, ...]:
    """Return the evidence after increasing numbers of pairs, for a plot.

    ``scores`` has the score of each pair (1, 1/2 or 0), in the order in which the pairs were judged. The result has at
    most ``points`` points, which are evenly spaced and include the last pair.
    """
    if not len(scores):
        return ()
    indices = np.unique(np.linspace(1, len(scores), min(points, len(scores))).round().astype(np.int64)) - 1
    wins, ties, losses = (np.cumsum(kind, dtype=np.int64)[indices] for kind in _outcome_masks(scores))
    return _evidence(wins, ties, losses, rule)


def decide_shadow(evidence: ShadowEvidence, hours_watched: float, rule: ShadowRule) -> ShadowDecision:
    """Decide on the current evidence whether to promote a candidate, roll it back or wait.

    A candidate that is shown to be worse than even is rolled back immediately, even if it is within the margin.
    """

    def percent(share: float) -> str:
        return f"{100 * share:.1f} %"

    summary = f"the win rate over {evidence.pairs:,} pairs is {percent(evidence.win_rate)}"
    confidence = f"{100 * rule.confidence:.4g} % confidence"
    if evidence.log_e_rollback >= rule.log_threshold:
        text = f"{summary}; with {confidence} it is below {percent(evidence.high)}, so the parent's answers are better"
        return ShadowDecision("roll back", text)
    minima = []
    if evidence.pairs < rule.minimum_pairs:
        minima.append(f"only {evidence.pairs:,} of at least {rule.minimum_pairs:,} pairs are judged")
    if hours_watched < rule.minimum_hours:
        hours = f"{math.floor(10 * hours_watched) / 10:g}"
        minima.append(f"the test has run for only {hours} of at least {rule.minimum_hours:g} hours")
    missing = " and ".join(minima)
    if evidence.log_e_promote >= rule.log_threshold:
        text = (
            f"{summary}; with {confidence} it is above {percent(evidence.low)}, at most {rule.margin:g} points below "
            "50 %"
        )
        return ShadowDecision("wait", f"{text}, but {missing}") if missing else ShadowDecision("promote", text)
    if not evidence.pairs:
        return ShadowDecision("wait", "no pair has been judged yet")
    interval = f"{summary} (interval {percent(evidence.low)} to {percent(evidence.high)})"
    requirement = f"promotion requires a lower end above {percent(rule.bound)}"
    return ShadowDecision("wait", f"{interval}; {requirement}" + (f". In addition, {missing}" if missing else ""))


def _outcome_masks(scores: Sequence[float]) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks of the pairs that were won, tied and lost."""
    values = np.asarray(scores, dtype=np.float64)
    kinds = values == 1, values == EVEN, values == 0
    if not np.logical_or.reduce(kinds).all():
        raise ValueError("the score of a judged pair must be 1, 1/2 or 0")
    return kinds


def _evidence(
    wins: NDArray[np.int64], ties: NDArray[np.int64], losses: NDArray[np.int64], rule: ShadowRule
) -> tuple[ShadowEvidence, ...]:
    pairs = wins + ties + losses
    rates = np.where(pairs > 0, (wins + ties / 2) / np.maximum(pairs, 1), EVEN)
    promote = log_evidence(wins, ties, losses, rule.bound)
    rollback = log_evidence(losses, ties, wins, EVEN)
    low = _lower_bound(wins, ties, losses, rule.log_threshold)
    high = 1 - _lower_bound(losses, ties, wins, rule.log_threshold)
    columns = (pairs, wins, ties, losses, rates, promote, rollback, low, high)  # in the order of the fields
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(ShadowEvidence(**dict(zip(ShadowEvidence.model_fields, row, strict=True))) for row in rows)


def _lower_bound(
    wins: NDArray[np.int64], ties: NDArray[np.int64], losses: NDArray[np.int64], log_threshold: float
) -> NDArray[np.float64]:
    """Return the largest win rate that is refuted from below, or 0."""
    low, high = np.zeros(len(wins)), np.ones(len(wins))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        refuted = log_evidence(wins, ties, losses, middle) >= log_threshold
        low, high = np.where(refuted, middle, low), np.where(refuted, high, middle)
    return low


# The same minimum as in the judge stage. A judge that contradicts itself calls every pair a tie, and ties promote.
MIN_CONSISTENCY = JudgeRule().min_consistency

ShadowOutcome = Literal["promote", "roll back", "wait", "kill"]
_OUTCOMES: dict[ShadowOutcome, Outcome] = {
    "promote": "pass",
    "roll back": "fail",
    "kill": "fail",
    "wait": "inconclusive",
}


class ShadowVerdict(FrozenModel):
    """Decision on a watched candidate, with the evidence for it."""

    candidate: str  # version of the candidate
    outcome: ShadowOutcome
    reason: str  # a sentence
    hours: float  # duration of watching
    evidence: ShadowEvidence
    consistency: float | None  # share of judged pairs in which both orders agree
    arms: ArmComparison
    controls: ControlResult  # control pairs that the judge found
    length_ratio: float | None = None  # length of the candidate's answers relative to the parent's
    cut_off: tuple[float, float] = (0.0, 0.0)  # share of answers that were cut off in percent: parent, candidate

    def as_verdict(self) -> Verdict:
        outcome = _OUTCOMES[self.outcome]
        return Verdict(
            name="shadow",
            outcome=outcome,
            publishable=outcome == "pass",
            reasons=() if outcome == "pass" else (self.reason,),
            evidence=self,
            section=Section(title="Live traffic", sentences=(self.reason, self.arms.reason)),
        )


class JudgedTotals(NamedTuple):
    """Totals of all judged pairs in a ledger. Pairs of numbers are of the parent and of the candidate."""

    scores: Sequence[float]  # for each pair 1 if the candidate's answer is better, 0 if the parent's is, or else 1/2
    consistency: float | None  # share of the judged pairs in which both orders agree; None if no pair was judged
    controls: Sequence[bool] = ()  # for each control pair, whether the judge preferred the intact answer both times
    characters: tuple[int, int] = (0, 0)  # of all answers
    cut_off: tuple[float, float] = (0.0, 0.0)  # share of the answers that the token limit cut off, in percent


def shadow_verdict(
    candidate: str, totals: JudgedTotals, rows: Sequence[ArmRow], hours: float, settings: ShadowSettings
) -> ShadowVerdict:
    """Return the current verdict on a candidate (a version), which was watched for a number of hours.

    ``rows`` are requests of both arms, in the order in which they ended.
    """
    candidate_rows = [row for row in rows if row.arm == "candidate"]
    parent_rows = [row for row in rows if row.arm == "parent"]
    evidence = evidence_of(totals.scores, settings.rule)
    consistency = totals.consistency
    # A bound that is valid at all looks together, as the controls are looked at again and again.
    share = error_rate(sum(totals.controls), len(totals.controls), settings.rule.confidence)
    controls = ControlResult(
        pairs=share.requests, found=share.failed, low=share.low, min_share=settings.rule.min_controls_found
    )
    length_ratio = totals.characters[1] / totals.characters[0] if totals.characters[0] else None
    outcome: ShadowOutcome = "kill"
    reason = kill_reason(candidate_rows, parent_rows, settings.kill_switch)
    if reason is None:
        outcome, reason = decide_shadow(evidence, hours, settings.rule)
        if outcome == "promote" and consistency is not None and consistency < MIN_CONSISTENCY:
            outcome = "wait"
            reason = (
                f"the judge gives the same judgment in both orders for only {100 * consistency:.0f} % of the pairs, "
                f"and promotion requires {100 * MIN_CONSISTENCY:.0f} %; {reason}"
            )
        elif outcome == "promote" and (obstacle := _obstacle(totals, controls, length_ratio, settings.rule)):
            outcome, reason = "wait", f"{obstacle}; {reason}"
    return ShadowVerdict(
        candidate=candidate,
        outcome=outcome,
        reason=reason,
        hours=hours,
        evidence=evidence,
        consistency=consistency,
        arms=compare_arms(candidate_rows, parent_rows, settings.rule.confidence),
        controls=controls,
        length_ratio=length_ratio,
        cut_off=totals.cut_off,
    )


def _obstacle(
    totals: JudgedTotals, controls: ControlResult, length_ratio: float | None, rule: ShadowRule
) -> str | None:
    """Return why the judged pairs cannot promote a candidate, regardless of the win rate, or None."""
    if totals.consistency is not None and not controls.passed:
        return controls.describe()
    if rule.max_length_ratio is not None and length_ratio is not None and length_ratio > rule.max_length_ratio:
        return (
            f"the candidate's answers are {length_ratio:.1f} times as long as the parent's, and max_length_ratio is "
            f"{rule.max_length_ratio:g}"
        )
    parent, candidate = totals.cut_off
    if candidate - parent > rule.max_cut_off:
        return (
            f"the token limit cuts off {candidate:.1f} % of the candidate's answers and {parent:.1f} % of the "
            f"parent's, and max_cut_off is {rule.max_cut_off:g} points"
        )
    return None

"""Decide on a watched candidate: apply the kill switch first, then the evidence from the judged pairs.

The functions are pure. The result converts to the common verdict (``tasks.stage.Verdict``): ``promote`` passes,
``roll back`` and ``kill`` fail, and ``wait`` is inconclusive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.judge import ControlResult, JudgeRule
from mergegate.tasks.shadow.arm_comparison import ArmComparison, compare_arms, error_rate
from mergegate.tasks.shadow.evidence import ShadowEvidence, decide_shadow, evidence_of
from mergegate.tasks.shadow.kill_switch import kill_reason
from mergegate.tasks.shadow.recorded_traffic import ArmRow
from mergegate.tasks.shadow.settings import ShadowRule, ShadowSettings
from mergegate.tasks.stage import Outcome, Section, Verdict

# The same minimum as in the judge stage. A judge that contradicts itself calls every pair a tie, and ties promote.
MIN_CONSISTENCY = JudgeRule().min_consistency

ShadowOutcome = Literal["promote", "roll back", "wait", "kill"]
_OUTCOMES: dict[ShadowOutcome, Outcome] = {
    "promote": "pass",
    "roll back": "fail",
    "kill": "fail",
    "wait": "inconclusive",
}


class ShadowVerdict(BaseModel):
    """Decision on a watched candidate, with the evidence for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """Totals of all judged pairs in a ledger.

    Attributes:
        scores: One score per judged pair: 1 if the candidate's answer is better, 0 if the parent's is, or else 1/2.
        consistency: Share of the judged pairs in which both orders agree, or None if no pair was judged.
        controls: For each control pair, whether the judge preferred the intact answer in both orders.
        characters: Characters of all answers of the parent and of the candidate.
        cut_off: Share of the answers that the token limit cut off, in percent, of the parent and of the candidate.
    """

    scores: Sequence[float]
    consistency: float | None
    controls: Sequence[bool] = ()
    characters: tuple[int, int] = (0, 0)
    cut_off: tuple[float, float] = (0.0, 0.0)


def shadow_verdict(
    candidate: str, totals: JudgedTotals, rows: Sequence[ArmRow], hours: float, settings: ShadowSettings
) -> ShadowVerdict:
    """Return the current verdict on a candidate, which was watched for a number of hours.

    Args:
        candidate: Version of the candidate.
        totals: Judged pairs and control pairs.
        rows: Requests of both arms, in the order in which they ended.
        hours: Hours of watching.
        settings: Conditions for promotion and rollback, and the limits of the kill switch.
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

"""Decide on a watched candidate: apply the kill switch first, then the evidence from the judged pairs.

The functions are pure. The result converts to the common verdict (``tasks.stage.Verdict``): ``promote`` passes,
``roll back`` and ``kill`` fail, and ``wait`` is inconclusive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.judge import JudgeRule
from mergegate.tasks.shadow.arm_comparison import ArmComparison, compare_arms
from mergegate.tasks.shadow.evidence import ShadowEvidence, decide_shadow, evidence_of
from mergegate.tasks.shadow.kill_switch import kill_reason
from mergegate.tasks.shadow.recorded_traffic import ArmRow
from mergegate.tasks.shadow.settings import ShadowSettings
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


def shadow_verdict(
    candidate: str,
    scores: Sequence[float],
    consistency: float | None,
    rows: Sequence[ArmRow],
    hours: float,
    settings: ShadowSettings,
) -> ShadowVerdict:
    """Return the current verdict on a candidate, which was watched for a number of hours.

    Args:
        candidate: Version of the candidate.
        scores: One score per judged pair: 1 if the candidate's answer is better, 0 if the parent's is, or else 1/2.
        consistency: Share of the judged pairs in which both orders agree, or None if no pair was judged.
        rows: Requests of both arms, in the order in which they ended.
        hours: Hours of watching.
        settings: Conditions for promotion and rollback, and the limits of the kill switch.
    """
    candidate_rows = [row for row in rows if row.arm == "candidate"]
    parent_rows = [row for row in rows if row.arm == "parent"]
    evidence = evidence_of(scores, settings.rule)
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
    return ShadowVerdict(
        candidate=candidate,
        outcome=outcome,
        reason=reason,
        hours=hours,
        evidence=evidence,
        consistency=consistency,
        arms=compare_arms(candidate_rows, parent_rows, settings.rule.confidence),
    )

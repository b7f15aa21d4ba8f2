"""What follows for a candidate that is watched: the kill switch first, then what the judged pairs show. Pure.

In the shape of every other judgement (``tasks.stage.Verdict``): promote is a pass, roll back and kill are a fail, and
whoever waits is undecided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.judge import JudgeRule
from mergegate.tasks.shadow.arms import ArmRow
from mergegate.tasks.shadow.evidence import ShadowEvidence, ShadowRule, decide_shadow, evidence_of
from mergegate.tasks.shadow.split import ArmComparison, compare_arms
from mergegate.tasks.shadow.switch import SwitchRule, kill_reason
from mergegate.tasks.stage import Outcome, Section, Verdict

# As of a judge that decides about a release: one that contradicts itself calls everything a tie, and ties promote.
MIN_CONSISTENCY = JudgeRule().min_consistency

ShadowOutcome = Literal["promote", "roll back", "wait", "kill"]
_OUTCOMES: dict[ShadowOutcome, Outcome] = {
    "promote": "pass",
    "roll back": "fail",
    "kill": "fail",
    "wait": "inconclusive",
}


class ShadowVerdict(BaseModel):
    """What follows, and all that led to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: str  # its version
    outcome: ShadowOutcome
    reason: str  # a sentence
    hours: float  # for which it was watched
    evidence: ShadowEvidence
    consistency: float | None  # share of judged pairs in which the judge said the same in both orders
    arms: ArmComparison

    def as_verdict(self) -> Verdict:
        """The same in the shape of every judgement."""
        outcome = _OUTCOMES[self.outcome]
        return Verdict(
            name="shadow",
            outcome=outcome,
            publishable=outcome == "pass",
            reasons=() if outcome == "pass" else (self.reason,),
            evidence=self,
            section=Section(title="On users' traffic", sentences=(self.reason, self.arms.reason)),
        )


def shadow_verdict(
    candidate: str,
    scores: Sequence[float],
    consistency: float | None,
    rows: Sequence[ArmRow],
    hours: float,
    rule: ShadowRule,
    switch: SwitchRule,
) -> ShadowVerdict:
    """The verdict on a candidate as it is now.

    Args:
        scores: Of each judged pair: 1 where the candidate's answer is better, 0 where the parent's, else 1/2.
        consistency: Share of the pairs that were judged alike in both orders; None: none was judged.
        rows: Requests of both arms, in the order in which they ended.
        hours: For which it was watched.
    """
    ours = [row for row in rows if row.arm == "candidate"]
    theirs = [row for row in rows if row.arm == "parent"]
    evidence = evidence_of(scores, rule)
    outcome: ShadowOutcome = "kill"
    reason = kill_reason(ours, theirs, switch)
    if reason is None:
        outcome, reason = decide_shadow(evidence, hours, rule)
        if outcome == "promote" and consistency is not None and consistency < MIN_CONSISTENCY:
            outcome = "wait"
            reason = (
                f"the judge agrees with itself on {100 * consistency:.0f} % of the pairs when they are swapped, "
                f"{100 * MIN_CONSISTENCY:.0f} % are needed to promote; {reason}"
            )
    return ShadowVerdict(
        candidate=candidate,
        outcome=outcome,
        reason=reason,
        hours=hours,
        evidence=evidence,
        consistency=consistency,
        arms=compare_arms(ours, theirs, rule.confidence),
    )

"""What the page of a watched release says: all that one look knows, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from mergegate.tasks.report import LostExample, ReportedArm, ShadowContent, ShadowPoint
from mergegate.tasks.shadow import (
    ArmSummary,
    JudgedPair,
    LatencyQuantiles,
    LostPair,
    Routing,
    Sample,
    ShadowSettings,
    ShadowVerdict,
    evidence_path,
)

_EXAMPLES = 10


def shadow_report(
    name: str,
    settings: ShadowSettings,
    routing: Routing,
    verdict: ShadowVerdict,
    judged: Sequence[JudgedPair],
    sample: Sample,
    lost: Sequence[LostPair],
    *,
    not_recorded: Mapping[str, int],
    looked: float,
) -> ShadowContent:
    """The state of a watched release.

    Args:
        routing: As it is after this look.
        verdict: What the evidence comes to now.
        judged: In the order in which they were.
        sample: What this look found to judge, and left out.
        looked: When, unix.
    """
    # Of requests that were judged in turn the newest so far: a course has no way back.
    newest = list(accumulate((pair.at for pair in judged), max))
    points = tuple(
        ShadowPoint(
            pairs=one.pairs,
            at=newest[one.pairs - 1],
            win_rate=one.win_rate,
            low=one.low,
            high=one.high,
            log_e_promote=one.log_e_promote,
            log_e_rollback=one.log_e_rollback,
        )
        for one in evidence_path([pair.score for pair in judged], settings.rule)
    )
    evidence, rule = verdict.evidence, settings.rule
    return ShadowContent(
        name=name,
        candidate=routing.candidate,
        serving=routing.serving,
        reason=verdict.reason if routing.serving == "watch" else routing.why,
        looked=looked,
        hours=verdict.hours,
        mode=routing.mode,
        share=routing.share,
        margin=rule.margin,
        confidence=rule.confidence,
        minimum_hours=rule.minimum_hours,
        minimum_pairs=rule.minimum_pairs,
        judge=settings.judge.model,
        wins=evidence.wins,
        ties=evidence.ties,
        losses=evidence.losses,
        consistency=verdict.consistency,
        identical=sum(pair.consistent is None for pair in judged),
        points=points,
        waiting=sample.waiting,
        left_out=tuple(sample.left_out.items()),
        parent_arm=_arm(verdict.arms.parent),
        candidate_arm=_arm(verdict.arms.candidate),
        errors=verdict.arms.reason,
        not_recorded=tuple(not_recorded.items()),
        examples=tuple(
            LostExample(
                at=one.at,
                question=one.question,
                parent=one.parent,
                candidate=one.candidate,
                reasoning=one.reasoning,
            )
            for one in lost[:_EXAMPLES]
        ),
        keep_days=settings.keep_days,
        alias=settings.alias or "",
    )


def _arm(arm: ArmSummary) -> ReportedArm:
    return ReportedArm(
        requests=arm.errors.requests,
        failed=arm.errors.failed,
        low=arm.errors.low,
        high=arm.errors.high,
        fallbacks=arm.fallbacks,
        first_byte=_three(arm.first_byte),
        seconds=_three(arm.seconds),
    )


def _three(found: LatencyQuantiles | None) -> tuple[float, float, float] | None:
    return None if found is None else (found.median, found.p95, found.p99)

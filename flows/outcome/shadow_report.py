"""Collect the state of a watched release as one frozen value for its page."""

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
    """Return the state of a watched release.

    Args:
        routing: Routing after this look.
        verdict: Verdict on the current evidence.
        judged: Judged pairs, in the order of judgment.
        sample: Pairs that this look sampled, and the number that it left out.
        looked: Time of the look, as a Unix timestamp.
    """
    # Use the newest request so far for each point, so that the curve never goes back in time.
    newest = list(accumulate((pair.at for pair in judged), max))
    points = tuple(
        ShadowPoint(
            pairs=point.pairs,
            at=newest[point.pairs - 1],
            win_rate=point.win_rate,
            low=point.low,
            high=point.high,
            log_e_promote=point.log_e_promote,
            log_e_rollback=point.log_e_rollback,
        )
        for point in evidence_path([pair.score for pair in judged], settings.rule)
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
                at=pair.at,
                question=pair.question,
                parent=pair.parent,
                candidate=pair.candidate,
                reasoning=pair.reasoning,
            )
            for pair in lost[:_EXAMPLES]
        ),
        retention_days=settings.retention_days,
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


def _three(quantiles: LatencyQuantiles | None) -> tuple[float, float, float] | None:
    return None if quantiles is None else (quantiles.median, quantiles.p95, quantiles.p99)

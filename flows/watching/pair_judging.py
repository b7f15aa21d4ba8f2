"""Judge the new pairs of one look, up to its limit, and store explanations for the lost ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mergegate.flows.watching.watch import DAY, Watch
from mergegate.tasks.judge import Judgment
from mergegate.tasks.shadow import (
    JudgedPair,
    JudgedPairs,
    LostPair,
    Sample,
    SampledPair,
    lost_pair,
    read_lost_pairs,
    sample_pairs,
    store_lost_pairs,
)
from mergegate.tasks.stage import advance, report_stage


def judge_new_pairs(watch: Watch, ledger: JudgedPairs, now: Callable[[], float]) -> tuple[Sample, tuple[LostPair, ...]]:
    """Judge new pairs, up to the limit of one look, oldest first.

    Raises:
        InvalidInput: The judge is not available. Its earlier judgments are stored.
    """
    settings, candidate = watch.settings, watch.routing.candidate
    oldest = now() - settings.retention_days * DAY
    watch.records.purge(oldest)
    with report_stage("sample", "") as stage:
        sample = _sampled(watch, ledger, settings.rule.pairs_per_look)
        stage.status, stage.summary = "made", f"{len(sample.pairs)} pairs to be judged, {sample.waiting} wait"
    lost: list[LostPair] = []
    try:
        with report_stage("judge", "") as stage:
            done = 0

            def note(pair: SampledPair, judged: JudgedPair, opinions: Sequence[Judgment]) -> None:
                nonlocal done
                done += 1
                advance(done, len(sample.pairs), "pairs")
                if judged.score == 0:
                    lost.append(lost_pair(pair, opinions))

            ledger.judge(sample.pairs, settings.judge, settings.judge, now=now, on_judged=note)
            stage.status, stage.summary = "made", f"{len(ledger.pairs):,} pairs judged so far"
    finally:
        lost_pairs = store_lost_pairs(watch.lost_file, candidate, lost, since=oldest)
    return sample, lost_pairs


def plan_judging(watch: Watch, ledger: JudgedPairs, now: Callable[[], float]) -> tuple[Sample, tuple[LostPair, ...]]:
    """Count the pairs that would be judged and left out, without calling the judge."""
    sample = _sampled(watch, ledger, 1)
    since = now() - watch.settings.retention_days * DAY
    lost = tuple(pair for pair in read_lost_pairs(watch.lost_file, watch.routing.candidate) if pair.at >= since)
    return Sample((), sample.waiting + len(sample.pairs), sample.left_out), lost


def _sampled(watch: Watch, ledger: JudgedPairs, limit: int) -> Sample:
    recorded = partial(watch.records.pairs, watch.routing.candidate, None)
    return sample_pairs(recorded, judged=ledger.by_session, half_judged=ledger.half_judged, limit=limit)

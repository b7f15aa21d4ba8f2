"""Read and judge the traffic of a release in shadow testing, and build its page. ``flows.shadow`` decides about it.

::

    watch = open_watch(profile)
    with watch.ledger() as ledger:
        evidence = watch.judge_new_pairs(ledger, time.time)
    page = watch.content(evidence, time.time())
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from sqlalchemy.exc import SQLAlchemyError

from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import Damaged, read_state, state_directory, write_state
from mergegate.tasks.base.stage import advance, announce, report_stage
from mergegate.tasks.quality.judge import Judgment
from mergegate.tasks.release.report import LostExample, ReportedArm, ShadowContent, ShadowPoint
from mergegate.tasks.shadow import (
    ArmSummary,
    JudgedPair,
    JudgedPairs,
    LostPair,
    Routing,
    Sample,
    SampledPair,
    ShadowSettings,
    ShadowVerdict,
    evidence_path,
    open_judged,
    read_judged,
    read_lost_pairs,
    read_routing,
    records_url,
    routing_file,
    sample_pairs,
    shadow_verdict,
    store_lost_pairs,
)
from mergegate.tasks.shadow.traffic import Records, open_records

_DAY_S = 86400.0
_ARMS_PERIOD_S = 7 * _DAY_S
# The names of the proxy's counters for requests that it did not record start with these words.
_LEFT_OUT = ("not recorded", "not copied", "body not kept")
_MOST_EXAMPLES = 10


class ReportedState(BaseModel):
    """State that the last interim look reported, so that the next look reports only changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: str = ""
    serving: str = ""
    alias_before: str = ""  # version that the alias pointed at before this candidate was promoted

    def is_current(self, routing: Routing) -> bool:
        """Return whether this state matches ``routing``."""
        return (self.candidate, self.serving) == (routing.candidate, routing.serving)


@dataclass(frozen=True)
class LookEvidence:
    """Evidence about a release in shadow testing, as of one interim look.

    Attributes:
        verdict: Verdict on all judged pairs and requests.
        judged: Judged pairs, in the order of judgment.
        sample: Pairs that this look sampled, and the numbers of pairs that wait or were left out.
        lost: Pairs in which the judge preferred the parent's answer, with explanations.
        not_recorded: Number of requests that the proxy did not record, by reason.
    """

    verdict: ShadowVerdict
    judged: Sequence[JudgedPair]
    sample: Sample
    lost: Sequence[LostPair]
    not_recorded: Mapping[str, int]


@dataclass(frozen=True)
class Watch:
    """A release in shadow testing: its profile, its routing and its records."""

    profile: Profile
    settings: ShadowSettings
    routing: Routing
    records: Records
    directory: Path

    def ledger(self) -> AbstractContextManager[JudgedPairs]:
        """Open the ledger of judged pairs. Other processes wait until it is closed."""
        waits = partial(announce, "another look is judging the same candidate; waiting for it")
        return open_judged(self.directory, self.profile.name, self.routing.candidate, self.settings.judge, waits)

    def judge_new_pairs(self, ledger: JudgedPairs, now: Callable[[], float]) -> LookEvidence:
        """Judge new pairs, oldest first, up to the limit of one look, and store explanations of the lost ones.

        Raises:
            InvalidInput: The judge is not available. Judgments up to this point are stored.
        """
        oldest = now() - self.settings.retention_days * _DAY_S
        self.records.purge(oldest)
        with report_stage("sample", "") as stage:
            sample = self._sample(ledger, self.settings.rule.pairs_per_look)
            stage.status = "made"
            stage.summary = f"{len(sample.pairs)} pairs to judge, {sample.waiting} pairs wait for the next look"
        lost: list[tuple[SampledPair, Sequence[Judgment]]] = []
        try:
            with report_stage("judge", "") as stage:
                count = 0

                def note(pair: SampledPair, judged_pair: JudgedPair, votes: Sequence[Judgment]) -> None:
                    nonlocal count
                    count += 1
                    advance(count, len(sample.pairs), "pairs")
                    if judged_pair.score == 0:
                        lost.append((pair, votes))

                ledger.judge(sample.pairs, self.settings.judge, now=now, on_judged=note)
                stage.status, stage.summary = "made", f"{len(ledger.pairs):,} pairs judged so far"
        finally:
            all_lost = store_lost_pairs(self._lost_file, self.routing.candidate, lost, since=oldest)
        return self._evidence(ledger, sample, all_lost)

    def read_evidence(self, ledger: JudgedPairs, now: Callable[[], float]) -> LookEvidence:
        """Return the evidence so far, without calling the judge. Unjudged pairs count as waiting."""
        sample = self._sample(ledger, 1)
        since = now() - self.settings.retention_days * _DAY_S
        lost = tuple(pair for pair in read_lost_pairs(self._lost_file, self.routing.candidate) if pair.at >= since)
        return self._evidence(ledger, Sample((), sample.waiting + len(sample.pairs), sample.left_out), lost)

    def content(self, evidence: LookEvidence, at: float) -> ShadowContent:
        """Return the content of the page for a look at the Unix time ``at``."""
        return shadow_content(self.profile.name, self.settings, self.routing, evidence, at)

    def current_content(self, now: Callable[[], float] = time.time) -> ShadowContent:
        """Return the content of the page for the evidence so far, without calling the judge."""
        ledger = read_judged(self.directory, self.profile.name, self.routing.candidate, self.settings.judge)
        return self.content(self.read_evidence(ledger, now), now())

    def reported_state(self) -> ReportedState:
        state = read_state(self._state_file, ReportedState.model_validate_json)
        return ReportedState() if state is None or isinstance(state, Damaged) else state

    def store_reported_state(self, serving: str, alias_before: str) -> None:
        state = ReportedState(candidate=self.routing.candidate, serving=serving, alias_before=alias_before)
        state_directory(self.directory, private=True)
        write_state(self._state_file, state.model_dump_json().encode())

    @property
    def _lost_file(self) -> Path:
        return self.directory / f"{self.profile.name}.lost.json"

    @property
    def _state_file(self) -> Path:
        return self.directory / f"{self.profile.name}.told.json"

    def _sample(self, ledger: JudgedPairs, limit: int) -> Sample:
        recorded = partial(self.records.pairs, self.routing.candidate, None)
        return sample_pairs(recorded, judged_requests=ledger.by_session, half_judged=ledger.half_judged, limit=limit)

    def _evidence(self, ledger: JudgedPairs, sample: Sample, lost_pairs: Sequence[LostPair]) -> LookEvidence:
        start = time.time() - _ARMS_PERIOD_S
        # A server that was repaired and is watched again is not killed for its earlier errors.
        rows = self.records.arms(
            self.routing.candidate, max(start, self.routing.since) if self.routing.watching else start
        )
        began = self.routing.since if self.routing.watching else min((row.at for row in rows), default=0.0)
        hours = max(0.0, max((row.at for row in rows), default=began) - began) / 3600
        verdict = shadow_verdict(
            self.routing.candidate,
            ledger.totals,
            sorted(rows, key=lambda row: row.at + row.seconds),  # by the time they ended
            hours,
            self.settings,
        )
        counts = self.records.counts(self.routing.candidate)
        not_recorded = {
            name.removeprefix("not recorded: "): count
            for name, count in counts.items()
            if name.startswith(_LEFT_OUT) and count
        }
        return LookEvidence(verdict, ledger.pairs, sample, lost_pairs, not_recorded)


def shadow_settings(profile: Profile) -> ShadowSettings:
    """Return the section ``shadow`` of a profile. Raise InvalidInput if there is none."""
    if profile.shadow is None:
        raise InvalidInput(
            f"profile {profile.name}",
            found="it has no section 'shadow'",
            expected="two servers, and a judge that compares their answers",
            remedy="see docs/how-to/watch-a-release.md; profiles/demo-shadow.yaml is an example",
        )
    return profile.shadow


def open_watch(profile: Profile) -> Watch:
    """Open the shadow test of a profile.

    Raises:
        InvalidInput: The profile has no section ``shadow``, or no proxy has started.
        Refused: The database with the records is not available.
    """
    settings = shadow_settings(profile)
    file = routing_file(profile.name)
    routing = read_routing(file)
    if routing is None:
        raise InvalidInput(
            f"shadow of {profile.name}",
            found="no release is watched yet",
            expected="a proxy that has started",
            remedy="start it: mergegate shadow PROFILE",
        )
    try:
        records = open_records(records_url(profile.name, settings))
    except SQLAlchemyError as error:
        raise Refused(
            "shadow.records",
            found=f"the database does not answer ({type(error).__name__})",
            expected="the records of the proxy",
            remedy="repeat the look when the database answers; earlier judgments are stored",
        ) from None
    return Watch(profile, settings, routing, records, file.parent)


def shadow_content(
    name: str, settings: ShadowSettings, routing: Routing, evidence: LookEvidence, at: float
) -> ShadowContent:
    """Return the state of a shadow test as one frozen value for its page.

    ``routing`` is the routing after this look, and ``at`` is the Unix time of the look.
    """
    # Use the newest request so far for each point, so that the curve never goes back in time.
    newest = list(accumulate((pair.at for pair in evidence.judged), max))
    points = tuple(
        ShadowPoint(at=newest[point.pairs - 1], **point.model_dump(include=set(ShadowPoint.model_fields)))
        for point in evidence_path([pair.score for pair in evidence.judged], settings.rule)
    )
    verdict, rule = evidence.verdict, settings.rule
    return ShadowContent(
        name=name,
        **routing.model_dump(include={"candidate", "serving", "mode", "share"}),
        **rule.model_dump(include={"margin", "confidence", "minimum_hours", "minimum_pairs"}),
        **verdict.model_dump(include={"hours", "consistency", "length_ratio", "cut_off"}),
        wins=verdict.evidence.wins,
        ties=verdict.evidence.ties,
        losses=verdict.evidence.losses,
        reason=verdict.reason if routing.serving == "watch" else routing.why,
        looked=at,
        judge=settings.judge.model,
        controls=(verdict.controls.found, verdict.controls.pairs),
        identical=sum(pair.consistent is None for pair in evidence.judged),
        points=points,
        waiting=evidence.sample.waiting,
        left_out=tuple(evidence.sample.left_out.items()),
        parent_arm=_reported_arm(verdict.arms.parent),
        candidate_arm=_reported_arm(verdict.arms.candidate),
        errors=verdict.arms.reason,
        not_recorded=tuple(evidence.not_recorded.items()),
        examples=tuple(LostExample(**pair.model_dump(exclude={"id"})) for pair in evidence.lost[:_MOST_EXAMPLES]),
        retention_days=settings.retention_days,
        alias=settings.alias or "",
    )


def _reported_arm(arm: ArmSummary) -> ReportedArm:
    return ReportedArm(**arm.errors.model_dump(exclude={"rate"}), **arm.model_dump(exclude={"errors"}))

"""Represent a watched release: its settings, current routing, recorded traffic and last reported state."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from sqlalchemy.exc import SQLAlchemyError

from mergegate.flows.outcome import shadow_report
from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import Damaged, read_state, state_directory, write_state
from mergegate.tasks.report import ShadowContent
from mergegate.tasks.shadow import (
    ArmRow,
    JudgedPairs,
    LostPair,
    Routing,
    Sample,
    ShadowSettings,
    ShadowVerdict,
    open_judged,
    read_judged,
    read_routing,
    records_url,
    routing_file,
    shadow_verdict,
)
from mergegate.tasks.shadow.records import Records, open_records
from mergegate.tasks.stage import announce

DAY = 86400.0
_HOUR = 3600.0
_ARMS_LOOKED_BACK = 7 * DAY
# Prefixes of the counts for traffic that the proxy left out.
_LEFT_OUT = ("not recorded", "not copied", "body not kept")


class ReportedState(BaseModel):
    """State that the last look reported. The next look reports only changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: str = ""
    serving: str = ""
    alias_before: str = ""  # version that the alias pointed at before this candidate was promoted

    def says(self, routing: Routing) -> bool:
        """Return whether this is still the current state."""
        return (self.candidate, self.serving) == (routing.candidate, routing.serving)


@dataclass(frozen=True)
class Watch:
    """A watched release: its profile, its routing and its records."""

    profile: Profile
    settings: ShadowSettings
    routing: Routing
    records: Records
    directory: Path

    @property
    def is_open(self) -> bool:
        """Whether there is no decision yet."""
        return self.routing.serving == "watch"

    @property
    def routing_file(self) -> Path:
        return routing_file(self.profile.name)

    def ledger(self) -> AbstractContextManager[JudgedPairs]:
        """Open the ledger for this process exclusively."""
        waits = partial(announce, "another look is judging the same candidate; waiting for it")
        return open_judged(self.directory, self.profile.name, self.routing.candidate, self.settings.judge, waits)

    def read_ledger(self) -> JudgedPairs:
        """Read the current ledger."""
        return read_judged(self.directory, self.profile.name, self.routing.candidate, self.settings.judge)

    def verdict(self, ledger: JudgedPairs) -> ShadowVerdict:
        """Return the verdict on the evidence so far."""
        rows = self.records.arms(self.routing.candidate, self._counted_from())
        began = self.routing.since if self.is_open else min((row.at for row in rows), default=0.0)
        hours = max(0.0, max((row.at for row in rows), default=began) - began) / _HOUR
        return shadow_verdict(
            self.routing.candidate, ledger.scores, ledger.consistency, _in_order(rows), hours, self.settings
        )

    def content(
        self,
        routing: Routing,
        verdict: ShadowVerdict,
        ledger: JudgedPairs,
        sample: Sample,
        lost: tuple[LostPair, ...],
        looked: float,
    ) -> ShadowContent:
        """Return the content of the page."""
        counts = self.records.counts(self.routing.candidate)
        left = {name: count for name, count in counts.items() if name.startswith(_LEFT_OUT) and count}
        missed = {name.removeprefix("not recorded: "): count for name, count in left.items()}
        name, settings = self.profile.name, self.settings
        judged = ledger.pairs
        return shadow_report(name, settings, routing, verdict, judged, sample, lost, not_recorded=missed, looked=looked)

    def told(self) -> ReportedState:
        """Return the state that the last look reported."""
        state = read_state(self._told_file, ReportedState.model_validate_json)
        return ReportedState() if state is None or isinstance(state, Damaged) else state

    def tell(self, serving: str, alias_before: str) -> None:
        """Store the state that this look reports."""
        state = ReportedState(candidate=self.routing.candidate, serving=serving, alias_before=alias_before)
        state_directory(self.directory, private=True)
        write_state(self._told_file, state.model_dump_json().encode())

    @property
    def lost_file(self) -> Path:
        return self.directory / f"{self.profile.name}.lost.json"

    @property
    def _told_file(self) -> Path:
        return self.directory / f"{self.profile.name}.told.json"

    def _counted_from(self) -> float:
        """Return the start of the period whose requests count.

        A server that was repaired and is watched again is not killed for its earlier errors.
        """
        back = time.time() - _ARMS_LOOKED_BACK
        return max(back, self.routing.since) if self.is_open else back


def shadow_settings(profile: Profile) -> ShadowSettings:
    """Return the shadow settings of a profile.

    Raises:
        InvalidInput: The profile has no section ``shadow``.
    """
    if profile.shadow is None:
        raise InvalidInput(
            f"profile {profile.name}",
            found="no 'shadow'",
            expected="two servers, and who judges their answers",
            remedy="see docs/shadow.md; profiles/demo-shadow.yaml is an example",
        )
    return profile.shadow


def open_watch(profile: Profile) -> Watch:
    """Open the watched release of a profile.

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
            found="nothing is watched yet",
            expected="a proxy that has begun",
            remedy="mergegate shadow PROFILE",
        )
    try:
        records = open_records(records_url(profile.name, settings))
    except SQLAlchemyError as error:
        raise Refused(
            "shadow.records",
            found=f"the database does not answer ({type(error).__name__})",
            expected="what the proxy has recorded",
            remedy="look again when it is there: what was judged is kept",
        ) from None
    return Watch(profile, settings, routing, records, file.parent)


def _in_order(rows: Iterable[ArmRow]) -> list[ArmRow]:
    """Sort requests by the time they ended."""
    return sorted(rows, key=lambda row: row.at + row.seconds)

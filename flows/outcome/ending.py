"""The end of a run as a value: what came out, or why nothing did, with the page about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mergegate.flows.attempt import AlreadyReleased
from mergegate.merge_core.errors import EXIT_CODES, Finding, MergegateError, finding_of
from mergegate.merge_core.files import state_directory, write_state
from mergegate.tasks.explain import Remedy
from mergegate.tasks.publish import Release
from mergegate.tasks.report import (
    Report,
    ReportContent,
    RunStatus,
    ShadowContent,
    SweepContent,
    render,
    render_shadow,
    render_sweep,
)
from mergegate.tasks.stage import home
from mergegate.tasks.store import Artifact


class RunOutcome(BaseModel):
    """The end of a run: what came out, or why nothing did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: RunStatus
    message: str  # what a person reads first
    version: str | None = None
    location: Path | str | None = None  # of the release: a directory, or an address
    report: Path | None = None  # the page about it
    content: ReportContent | None = None  # the evidence, where the run got so far
    sweep: SweepContent | None = None  # of a sweep: the search and its confirmation
    # Of a release that is watched: what is shown so far, and what became of it.
    shadow: Annotated[ShadowContent | None, Field(exclude_if=lambda content: content is None)] = None
    # Of a run that a check stopped before there was a verdict: what it found, and what to do.
    stopped_by: Annotated[Finding | None, Field(exclude_if=lambda finding: finding is None)] = None
    # What this run was told otherwise than its profile says, as KEY=VALUE.
    overrides: Annotated[tuple[str, ...], Field(exclude_if=lambda overrides: not overrides)] = ()
    # Of a refusal: the change of the recipe that has the strongest reason.
    to_try: Annotated[Remedy | None, Field(exclude_if=lambda remedy: remedy is None)] = None
    # The page about it as HTML, to be kept under a name of its own; empty: there is no evidence to be drawn.
    page: Annotated[str, Field(exclude=True, repr=False)] = ""

    @property
    def exit_code(self) -> int:
        """Of the command that ends so."""
        return EXIT_CODES[self.status]

    @property
    def in_words(self) -> str:
        """The message and what to try, for whoever has no other place for it: a log, a state, a line of the history."""
        return self.message + (f"\nto try: {self.to_try.text()}: {self.to_try.reason}" if self.to_try else "")


def stopped_outcome(error: MergegateError) -> RunOutcome:
    """The end of a run that a check refused, or whose input could not mean anything."""
    return RunOutcome(status=error.status, message=str(error), stopped_by=finding_of(error))


def reported_outcome(content: ReportContent, report: Artifact[Report], release: Release | None) -> RunOutcome:
    """The end of a run that reached the gate. Without a release it was refused, or nothing was to be published."""
    page = _page_of(content, report)
    place = _keep_latest(page, f"{content.name}.html")
    if release is None:
        if content.verdict.publishable:
            message = f"{content.name} passed the gate"
            return RunOutcome(status="passed", message=message, report=place, page=page, content=content)
        message = "\n".join((f"{content.name} is not released", *content.verdict.reasons))
        remedy = next(iter(content.explanation.remedies), None) if content.explanation else None
        return RunOutcome(status="refused", message=message, report=place, page=page, content=content, to_try=remedy)
    what = (
        f"released {release.name} {release.version}" if release.new else f"nothing new: {release.version} is released"
    )
    return RunOutcome(
        status="released" if release.new else "nothing new",
        message=what,
        version=release.version,
        location=release.location,
        report=place,
        page=page,
        content=content,
    )


def already_released_outcome(name: str, attempt: AlreadyReleased) -> RunOutcome:
    """The end of a run whose merge is what is released today, in a profile that holds merges against that."""
    release = attempt.release
    page = release.directory / "report.html"
    return RunOutcome(
        status="nothing new",
        message=f"nothing new: {release.version} is released",
        version=release.version,
        location=release.location,
        report=page if page.is_file() else None,
    )


def store_sweep_page(content: SweepContent) -> Path:
    """The page of a sweep, where a person looks for it: the latest of each profile, by name."""
    return _keep_latest(render_sweep(content), f"{content.name}.sweep.html")


def store_shadow_page(content: ShadowContent) -> Path:
    """The page of a watched release, where a person looks for it."""
    return _keep_latest(render_shadow(content), f"{content.name}.shadow.html")


def _page_of(content: ReportContent, report: Artifact[Report]) -> str:
    """That of the release, and where the model was served, what a machine took for that as well."""
    return render(content) if content.served else (report.directory / "report.html").read_text(encoding="utf-8")


def _keep_latest(page: str, name: str) -> Path:
    """The page where a person looks for it: the latest of each profile, by name."""
    place = state_directory(home() / "reports", private=True) / name
    write_state(place, page.encode())
    return place

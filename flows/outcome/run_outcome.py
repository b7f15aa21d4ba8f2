"""Define the outcome of a run: its status, message, reasons, remedy, and the page about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

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
from mergegate.tasks.stage import StageEnd, home
from mergegate.tasks.store import Artifact


class PublishedVariants(BaseModel):
    """Quantized variants that share a place."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str
    types: tuple[str, ...]
    version: str
    location: Path | str  # a directory or a URL
    new: bool  # whether this run published them


class RunOutcome(BaseModel):
    """The result of a run, or the reason why there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: RunStatus
    message: str  # one sentence for the user
    # Why the run was refused, one sentence each. In JSON, they are part of the message.
    reasons: Annotated[tuple[str, ...], Field(exclude=True)] = ()
    version: str | None = None
    location: Path | str | None = None  # of the release: a directory or a URL
    report: Path | None = None  # page about the run
    # Quantized variants of the release. Verdicts, including those of variants that failed, are in ``content``.
    variants: Annotated[tuple[PublishedVariants, ...], Field(exclude_if=lambda variants: not variants)] = ()
    content: ReportContent | None = None  # evidence, if the run got that far
    sweep: SweepContent | None = None  # of a sweep: the search and its confirmation
    # For a shadow test: the evidence so far and the decision.
    shadow: Annotated[ShadowContent | None, Field(exclude_if=lambda content: content is None)] = None
    # For a run that a check stopped before there was a verdict: the finding and its remedy.
    stopped_by: Annotated[Finding | None, Field(exclude_if=lambda finding: finding is None)] = None
    # Profile settings that this run overrode, as KEY=VALUE.
    overrides: Annotated[tuple[str, ...], Field(exclude_if=lambda overrides: not overrides)] = ()
    # For a refusal: the change of the recipe with the strongest reason.
    to_try: Annotated[Remedy | None, Field(exclude_if=lambda remedy: remedy is None)] = None
    # Stages of the run, in the order in which they ended.
    stages: Annotated[tuple[StageEnd, ...], Field(exclude=True, repr=False)] = ()
    # Page as HTML, archived under its own name. Empty if there is no evidence to draw.
    page: Annotated[str, Field(exclude=True, repr=False)] = ""

    @property
    def exit_code(self) -> int:
        """Exit code of the command that started the run."""
        return EXIT_CODES[self.status]

    @property
    def fix(self) -> tuple[str, ...]:
        """Expectation and remedy of the check that stopped the run, one line each. May be empty."""
        lines = (("expected: ", "expected"), ("remedy:   ", "remedy"))
        return tuple(f"{label}{text}" for label, name in lines if (text := getattr(self.stopped_by, name, "")))

    @property
    def text(self) -> str:
        """The message, the reasons and the fix, for JSON and pages."""
        return "\n".join((self.message, *self.reasons, *(f"  {line}" for line in self.fix)))

    @property
    def text_with_proposal(self) -> str:
        """The text followed by the proposed change of the recipe, for a log, a state or the history."""
        return self.text + (f"\nto try: {self.to_try.text()}: {self.to_try.reason}" if self.to_try else "")


def stopped_outcome(error: MergegateError) -> RunOutcome:
    """Return the outcome of a run that an error ended: a check refused it, or its input was invalid."""
    finding = finding_of(error)
    return RunOutcome(status=error.status, message=str(finding), stopped_by=finding)


def reported_outcome(content: ReportContent, report: Artifact[Report], release: Release | None) -> RunOutcome:
    """Return the outcome of a run that reached the gate.

    Without a release, either the gate refused the merge or there was nothing to publish.
    """
    # If the model or a variant was served, the page includes the observations on this machine.
    is_local = bool(content.served or content.variants)
    page = render(content) if is_local else (report.directory / "report.html").read_text(encoding="utf-8")
    path = _store_latest(page, f"{content.name}.html")
    if release is None:
        if content.verdict.publishable:
            message = f"{content.name} passed the gate"
            return RunOutcome(status="passed", message=message, report=path, page=page, content=content)
        return RunOutcome(
            status="refused",
            message=f"{content.name} is not released",
            reasons=content.verdict.reasons,
            report=path,
            page=page,
            content=content,
            to_try=next(iter(content.explanation.remedies), None) if content.explanation else None,
        )
    message = (
        f"released {release.name} {release.version}" if release.new else f"nothing new: {release.version} is released"
    )
    return RunOutcome(
        status="released" if release.new else "nothing new",
        message=message,
        version=release.version,
        location=release.location,
        report=path,
        page=page,
        content=content,
    )


def store_page(content: SweepContent | ShadowContent) -> Path:
    """Write the page of a sweep or of a shadow test to the reports directory, and return its path."""
    if isinstance(content, SweepContent):
        return _store_latest(render_sweep(content), f"{content.name}.sweep.html")
    return _store_latest(render_shadow(content), f"{content.name}.shadow.html")


def _store_latest(page: str, name: str) -> Path:
    """Write a page to the reports directory, in place of the previous one with this name, and return its path."""
    path = state_directory(home() / "reports", private=True) / name
    write_state(path, page.encode())
    return path

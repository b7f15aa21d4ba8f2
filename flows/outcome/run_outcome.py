"""Define the outcome of a run, and archive it: its page, its line in the history, and a summary.

The outcome has the status of the run, its message and reasons, a remedy, and the page about it. A failure to archive it
never fails the run.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mergegate.flows.prefect_api import page_of_run
from mergegate.merge_core.errors import EXIT_CODES, Finding, MergegateError, finding_of, to_printable
from mergegate.merge_core.files import read_state, state_directory, write_state
from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.stage import StageEnd, created_bytes, home, joint_status
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.quality.gate import GateVerdict, GuardVerdict, SuiteVerdict
from mergegate.tasks.release.explain import Remedy
from mergegate.tasks.release.publish import Release
from mergegate.tasks.release.report import (
    EndedRun,
    Report,
    ReportContent,
    RunParent,
    RunRecord,
    RunScore,
    RunStage,
    RunStatus,
    RunVariant,
    ShadowContent,
    SweepContent,
    add_stages,
    archive_run,
    as_markdown,
    file_name,
    render,
    render_ending,
    render_shadow,
    render_sweep,
    shadow_rows,
)
from mergegate.tasks.release.telemetry import export_metrics, export_to_trackers

_log = logging.getLogger(__name__)
_MAX_PAGE_BYTES = 64 << 20
_MAX_ITEMS = 200  # guards, parents and stages
_MAX_SUMMARY_BYTES = 90_000  # Prefect accepts more, but its pages become slow


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


def archive_outcome(
    outcome: RunOutcome, name: str, began: float, stages: Sequence[StageEnd], flow: str = ""
) -> RunOutcome:
    """Archive an outcome, and return it with the path of its page. If archiving fails, return it unchanged.

    ``began`` is the start of the run on the monotonic clock. ``stages`` are in the order in which they ended. ``name``
    is used if the outcome does not contain the name of the profile, and ``flow`` if the run is outside Prefect.
    """
    try:
        flow = running_flow()[1] or flow
        content = outcome.content or outcome.sweep or outcome.shadow
        name = content.name if content is not None else name
        record = _run_record(outcome, name, flow, time.monotonic() - began, stages)
        suffix = f".{flow}" if flow == "shadow" or (flow == "sweep" and outcome.content is None) else ""
        page = _page(outcome, name, flow, stages)
        export_metrics(record, home())
        export_to_trackers(record, home())
        archived = archive_run(
            home() / "reports",
            record,
            page,
            latest=f"{file_name(name)}{suffix}",
            search=render_sweep(outcome.sweep) if outcome.sweep and outcome.content else None,
            latest_page=render_shadow(outcome.shadow) if outcome.shadow else None,
        )
        # Next to the page, for a pull request: gh pr comment --body-file .mergegate/reports/NAME.md
        write_state(archived.latest.with_suffix(".md"), prefect_page(outcome, name).encode())
    except Exception as failure:
        _log.warning("the report of this run could not be stored: %s", failure)
        return outcome
    return outcome.model_copy(update={"report": archived.latest})


def _run_record(outcome: RunOutcome, name: str, flow: str, seconds: float, stages: Sequence[StageEnd]) -> RunRecord:
    run, _ = running_flow()
    content = outcome.content
    drift = content.verdict.drift if content else None
    calls_by_stage: dict[str, list[StageEnd]] = {}  # in the order in which the stages first ended
    for end in stages:
        calls_by_stage.setdefault(end.stage, []).append(end)
    cores = os.cpu_count() or 1
    machine = (platform.node(), format_count(cores, "core"), f"{platform.system()} {platform.machine()}")
    return RunRecord(
        run=run,
        flow=flow,
        profile=to_printable(name),
        ended=time.time(),
        seconds=seconds,
        status=outcome.status,
        message=to_printable(outcome.text_with_proposal),
        overrides=tuple(map(to_printable, outcome.overrides))[:_MAX_ITEMS],
        version=outcome.version,
        location=to_printable(str(outcome.location)) if outcome.location else "",
        machine=", ".join(filter(None, machine)),
        method=to_printable(content.method) if content else outcome.sweep.method if outcome.sweep else "",
        recipe=to_printable(content.recipe) if content else "",
        parents=tuple(
            RunParent(
                name=to_printable(parent.name),
                ref=to_printable(parent.ref),
                revision=parent.revision,
                digest=parent.digest[:16],
            )
            for parent in (content.parents[:_MAX_ITEMS] if content else ())
        ),
        windows=tuple(
            replace(run, checkpoints=tuple(map(to_printable, run.checkpoints[-_MAX_ITEMS:])))
            for run in (content.runs if content else ())
        ),
        scores=_scores(content.verdict) if content else (),
        variants=_variants(content) if content else (),
        perplexity=drift.ratio if drift and drift.ratio is not None and math.isfinite(drift.ratio) else None,
        perplexity_limit=drift.max_ratio if drift else None,
        stages=tuple(
            RunStage(
                name=to_printable(stage),
                seconds=sum(max(0.0, call.seconds) for call in calls),
                calls=len(calls),
                cached=sum(call.status == "cached" for call in calls),
                status=joint_status([(call.subject, call.status) for call in calls]),
            )
            for stage, calls in list(calls_by_stage.items())[:_MAX_ITEMS]
        ),
        bytes_merged=sum(file.size for file in content.files) if content else 0,
        bytes_made=created_bytes(),
        seen_at=page_of_run(run),
    )


def _scores(verdict: GateVerdict) -> tuple[RunScore, ...]:
    """Return the score of every guard, after that of each group of tasks that is judged by its mean.

    Scores without finite bounds are left out.
    """
    scores = []
    all_judged: tuple[SuiteVerdict | GuardVerdict, ...] = (*verdict.suites, *verdict.guards)
    for judged in all_judged:
        shared = judged.model_dump(include={"drop", "low", "high", "max_drop", "margin", "outcome"})
        shared["reference"] = to_printable(judged.reference)
        if isinstance(judged, GuardVerdict):
            shared |= {"merge": 100 * judged.merge_score, "documents": judged.n}
            shared |= {"task": to_printable(judged.task), "differing": judged.lost + judged.won}
        else:
            shared["task"] = f"mean of {judged.tasks}"
        if all(map(math.isfinite, (judged.drop, judged.low, judged.high, shared.get("merge", 0.0)))):
            scores.append(RunScore(**shared))
    return tuple(scores)[:_MAX_ITEMS]


def _variants(content: ReportContent) -> tuple[RunVariant, ...]:
    """Return the verdict on each quantized variant, in the profile's order."""
    variants = []
    for variant in content.variants[:_MAX_ITEMS]:
        gate = variant.gate
        judged = gate.suites[:1] or gate.guards if gate else ()
        drop = max((item.drop for item in judged if math.isfinite(item.drop)), default=None)
        variants.append(
            RunVariant(
                type=to_printable(variant.type),
                outcome=variant.outcome,
                published=variant.publishable and content.verdict.publishable,
                drop=drop,
            )
        )
    return tuple(variants)


def _page(outcome: RunOutcome, name: str, flow: str, stages: Sequence[StageEnd]) -> str:
    """Return the page about the evidence, or else a page that shows how far the run got and why it ended."""
    ended = tuple(
        end._replace(
            stage=to_printable(end.stage), subject=to_printable(end.subject), summary=to_printable(end.summary)
        )
        for end in stages
    )
    if outcome.page:
        return add_stages(outcome.page, ended)
    if outcome.shadow is not None:
        return render_shadow(outcome.shadow.model_copy(update={"examples": ()}))
    if outcome.sweep is not None:
        return outcome.report.read_text(encoding="utf-8") if outcome.report else render_sweep(outcome.sweep)
    if outcome.status == "nothing new" and outcome.report is not None:  # the release has a page about its evidence
        released = read_state(outcome.report, bytes.decode, most=_MAX_PAGE_BYTES)
        if isinstance(released, str):
            return add_stages(released, ended)
    return render_ending(
        EndedRun(
            name=to_printable(name),
            flow=flow,
            status=outcome.status,
            message=to_printable(outcome.text),
            finding=outcome.stopped_by,
            exception=to_printable(outcome.message.partition(": ")[2]) if outcome.status == "failed" else "",
            log=f"the log of Prefect's flow run {running_flow()[0]}, or the terminal",
            stages=ended,
        )
    )


def prefect_page(outcome: RunOutcome, name: str) -> str:
    """Render the outcome as Markdown for Prefect's page and for pull requests.

    The status comes first, then the evidence, then the path of the report. Long evidence is cut.
    """
    mark = "✓" if outcome.exit_code == 0 else "✗"
    head = f"## {mark} {outcome.status}: {name}\n\n"
    if outcome.content:
        evidence = as_markdown(outcome.content)
    else:
        fence = "```"
        while fence in outcome.text:  # no line of untrusted text may close the fence
            fence += "`"
        evidence = f"{fence}\n{outcome.text}\n{fence}\n"
    if outcome.shadow:
        evidence += "\n" + "".join(f"* {label}: {value}\n" for label, value in shadow_rows(outcome.shadow))
    foot = f"\nReport: `{outcome.report}`\n" if outcome.report else ""
    room = _MAX_SUMMARY_BYTES - len((head + foot).encode())
    if len(evidence.encode()) > room:
        complete_lines = evidence.encode()[: room - 100].decode(errors="ignore").rpartition("\n")[0]
        evidence = f"{complete_lines}\n\nThe report shows the rest.\n"
    return head + evidence + foot


def running_flow() -> tuple[str, str]:
    """Return the ID of the current flow run and the name of its flow, or two empty strings outside a flow run."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return "", ""
    return str(context.flow_run.id), context.flow.name if context.flow else ""

"""Archive a finished run: its page and its line in the history. A failure to do so never fails the run."""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from mergegate.flows.outcome.ending import RunOutcome, stopped_outcome
from mergegate.flows.outcome.markdown import prefect_page
from mergegate.flows.outcome.run_names import profile_name
from mergegate.flows.prefect_api import page_of_run
from mergegate.merge_core.errors import MergegateError, shown
from mergegate.merge_core.files import read_state, write_state
from mergegate.tasks.gate import GuardVerdict, SuiteVerdict
from mergegate.tasks.report import (
    EndedRun,
    EndedStage,
    ReportContent,
    RunParent,
    RunRecord,
    RunScore,
    RunStage,
    file_name,
    keep_run,
    render_ending,
    render_shadow,
    render_sweep,
)
from mergegate.tasks.stage import StageEnd, bytes_made, home, joint_status
from mergegate.tasks.telemetry import export_metrics, export_to_trackers

_log = logging.getLogger(__name__)
_LARGEST = 64 << 20  # upper limit for a release page, in bytes
_MOST = 200  # upper limit for guards, parents and stages


def record_refused_run(error: MergegateError, profile: Path, flow: str) -> None:
    """Record that a run of ``profile`` was stopped before its flow started.

    A missing file is not recorded, because the profile that it would belong to is unknown.
    """
    if profile.is_file():
        keep_outcome(stopped_outcome(error), profile_name(profile), RunClock(), (), flow=flow)


class RunClock:
    """Stopwatch of a run, on a monotonic clock."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the run started."""
        return time.monotonic() - self._began


def keep_outcome(
    outcome: RunOutcome, name: str, clock: RunClock, stages: Sequence[StageEnd], flow: str = ""
) -> RunOutcome:
    """Return the outcome with the path of its archived page.

    Args:
        name: Name of the profile, used if the outcome has none.
        stages: Stages that ran, in the order in which they ended.
        flow: Name of the flow, used outside a flow run.
    """
    try:
        run, running = running_flow()
        flow = running or flow
        name = _name_of(outcome, name)
        record = run_record(outcome, name, run=run, flow=flow, seconds=clock.seconds(), stages=stages)
        record = record.model_copy(update={"bytes_made": bytes_made(), "seen_at": page_of_run(run)})
        suffix = f".{flow}" if flow == "shadow" or (flow == "sweep" and outcome.content is None) else ""
        search = render_sweep(outcome.sweep) if outcome.sweep and outcome.content else None
        page = _page(outcome, name, flow, stages)
        export_metrics(record, home())
        export_to_trackers(record, home())
        shadow_page = render_shadow(outcome.shadow) if outcome.shadow else None
        archived = keep_run(
            home() / "reports",
            record,
            page,
            latest=f"{file_name(name)}{suffix}",
            search=search,
            latest_page=shadow_page,
        )
        # Next to the page, for a pull request: gh pr comment --body-file .mergegate/reports/NAME.md
        write_state(archived.latest.with_suffix(".md"), prefect_page(outcome, name).encode())
    except Exception as failure:
        _log.warning("the report of this run was not kept: %s", failure)
        return outcome
    return outcome.model_copy(update={"report": archived.latest})


def run_record(
    outcome: RunOutcome, name: str, *, run: str, flow: str, seconds: float, stages: Iterable[StageEnd]
) -> RunRecord:
    """Return the history record of a run."""
    content = outcome.content
    drift = content.verdict.drift if content else None
    return RunRecord(
        run=run,
        flow=flow,
        profile=shown(name),
        ended=time.time(),
        seconds=seconds,
        status=outcome.status,
        message=shown(outcome.in_words),
        overrides=tuple(map(shown, outcome.overrides))[:_MOST],
        version=outcome.version,
        location=shown(str(outcome.location)) if outcome.location else "",
        machine=_machine(),
        method=shown(content.method) if content else outcome.sweep.method if outcome.sweep else "",
        recipe=shown(content.recipe) if content else "",
        parents=_parents(content) if content else (),
        scores=_scores(content) if content else (),
        perplexity=drift.ratio if drift and drift.ratio is not None and math.isfinite(drift.ratio) else None,
        perplexity_limit=drift.max_ratio if drift else None,
        stages=stages_together(stages),
        bytes_merged=sum(file.size for file in content.files) if content else 0,
    )


def _machine() -> str:
    """Describe this machine, for example 'build-7, 16 cores, Linux x86_64'."""
    cores = os.cpu_count() or 1
    parts = (platform.node(), f"{cores} core{'' if cores == 1 else 's'}", f"{platform.system()} {platform.machine()}")
    return ", ".join(filter(None, parts))


def stages_together(ends: Iterable[StageEnd]) -> tuple[RunStage, ...]:
    """Return one line per stage, in the order in which the stages first ended."""
    by_name: dict[str, list[StageEnd]] = {}
    for end in ends:
        by_name.setdefault(end.stage, []).append(end)
    return tuple(
        RunStage(
            name=shown(name),
            seconds=sum(max(0.0, call.seconds) for call in calls),
            calls=len(calls),
            cached=sum(call.status == "cached" for call in calls),
            status=joint_status([(call.subject, call.status) for call in calls]),
        )
        for name, calls in list(by_name.items())[:_MOST]
    )


def _parents(content: ReportContent) -> tuple[RunParent, ...]:
    return tuple(
        RunParent(name=shown(parent.name), ref=shown(parent.ref), revision=parent.revision, digest=parent.digest[:16])
        for parent in content.parents[:_MOST]
    )


def _scores(content: ReportContent) -> tuple[RunScore, ...]:
    """Return the score of every guard. If all tasks are judged together, the score of their mean comes first.

    Scores without finite bounds are left out.
    """
    scores = [
        *(_score(suite, f"mean of {suite.tasks}", None) for suite in content.verdict.suites),
        *(_score(guard, guard.task, 100 * guard.merge_score) for guard in content.verdict.guards),
    ]
    return tuple(score for score in scores if score is not None)[:_MOST]


def _score(judged: SuiteVerdict | GuardVerdict, task: str, merge: float | None) -> RunScore | None:
    if not all(map(math.isfinite, (judged.drop, judged.low, judged.high, merge or 0.0))):
        return None
    return RunScore(
        task=shown(task),
        reference=shown(judged.reference),
        merge=merge,
        drop=judged.drop,
        low=judged.low,
        high=judged.high,
        max_drop=judged.max_drop,
        margin=judged.margin,
        outcome=judged.outcome,
        documents=judged.n if isinstance(judged, GuardVerdict) else 0,
        differing=judged.lost + judged.won if isinstance(judged, GuardVerdict) else 0,
    )


def _name_of(outcome: RunOutcome, name: str) -> str:
    content = outcome.content or outcome.sweep or outcome.shadow
    return content.name if content is not None else name


def _page(outcome: RunOutcome, name: str, flow: str, stages: Sequence[StageEnd]) -> str:
    """Return the page about the evidence, or if there is none, a page that says how far the run got and why."""
    if outcome.page:
        return outcome.page
    if outcome.shadow is not None:
        return render_shadow(outcome.shadow.without_examples())
    if outcome.sweep is not None:
        return outcome.report.read_text(encoding="utf-8") if outcome.report else render_sweep(outcome.sweep)
    if outcome.status == "nothing new" and outcome.report is not None:  # the released model has already been judged
        released = read_state(outcome.report, bytes.decode, most=_LARGEST)
        if isinstance(released, str):
            return released
    finding = outcome.stopped_by
    facts = {"where": finding.where, "found": finding.found} if finding else {}
    facts |= {"expected": finding.expected, "remedy": finding.remedy} if finding else {}
    log = f"the log of Prefect's flow run {running_flow()[0]}, or the terminal"
    return render_ending(
        EndedRun(
            name=shown(name),
            flow=flow,
            status=outcome.status,
            message=shown(outcome.message),
            exception=shown(outcome.message.partition(": ")[2]) if outcome.status == "failed" else "",
            log=log,
            stages=tuple(
                EndedStage(
                    name=shown(stage.stage),
                    subject=shown(stage.subject),
                    status=stage.status,
                    seconds=stage.seconds,
                    summary=shown(stage.summary),
                )
                for stage in stages
            ),
            **facts,
        )
    )


def running_flow() -> tuple[str, str]:
    """Return the id and the name of the running flow, or two empty strings outside a flow run."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return "", ""
    return str(context.flow_run.id), context.flow.name if context.flow else ""

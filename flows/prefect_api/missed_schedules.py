"""Handle missed schedules: after an outage, run the most recent one and cancel the rest.

Prefect keeps every run that was due while no worker was running, and then starts them all, one after the other. But a
run uses the state of the world at its start. A run that started after another one was due has therefore done the work
of that one too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

_OF_A_SCHEDULE = "auto-scheduled"  # Prefect's own tag
_ENDED_OR_WAITING = ["COMPLETED", "FAILED", "PAUSED"]
# States that end a run without a result, so the next run must still do the work.
_WITHOUT_RESULT = frozenset({"Failed", "TimedOut"})


def find_replacement_run() -> str | None:
    """Return the name of a run that has already done the work of the current run, or None if there is work to do.

    The replacement belongs to the same deployment, has the same parameters, started after the current run was due, and
    has ended with a result or waits for approval. Only scheduled runs are replaced. A run does its own work if a user
    started it, if it continues after an approval, or if it has no server.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterDeploymentId,
        FlowRunFilterStartTime,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or run.deployment_id is None or run.expected_start_time is None or run.run_count > 1:
        return None
    if _OF_A_SCHEDULE not in run.tags:
        return None
    filters = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
        start_time=FlowRunFilterStartTime(after_=run.expected_start_time),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ENDED_OR_WAITING)),
    )
    with get_client(sync_client=True) as client:
        candidates = client.read_flow_runs(flow_run_filter=filters)
    return next((candidate.name for candidate in candidates if _did_the_work_of(candidate, run)), None)


def _did_the_work_of(candidate: FlowRun, run: FlowRun) -> bool:
    return (
        candidate.id != run.id
        and candidate.state_name not in _WITHOUT_RESULT
        and candidate.parameters == run.parameters
    )

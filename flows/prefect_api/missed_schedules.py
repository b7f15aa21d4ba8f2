"""Nights that nobody carried out: one of them is made up for, and no other.

Prefect keeps every run that was due while no worker was there, and has them all carried out, one after the other, when
there is one again. But a run looks at the world as it is when it begins: whichever began after another was due has done
that one's work as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

_OF_A_SCHEDULE = "auto-scheduled"  # Prefect's own tag
_ENDED_OR_WAITING = ["COMPLETED", "FAILED", "PAUSED"]
# What ends a run without an answer: the next one has to be asked.
_WITHOUT_AN_ANSWER = frozenset({"Failed", "TimedOut"})


def find_replacement_run() -> str | None:
    """The name of a run that has done the work of the one that runs here: None for whoever has work to do.

    That is one of the same deployment, with the same parameters, that began after this one was due and came to an
    answer, or waits for a person's. A run that somebody has asked for, one that goes on after such a wait, and one that
    no server has made has its own work to do.
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
    of_the_same = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
        start_time=FlowRunFilterStartTime(after_=run.expected_start_time),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ENDED_OR_WAITING)),
    )
    with get_client(sync_client=True) as client:
        later = client.read_flow_runs(flow_run_filter=of_the_same)
    return next((one.name for one in later if _did_the_work_of(one, run)), None)


def _did_the_work_of(one: FlowRun, run: FlowRun) -> bool:
    return one.id != run.id and one.state_name not in _WITHOUT_AN_ANSWER and one.parameters == run.parameters

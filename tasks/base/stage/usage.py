"""Record which artifacts the running flow uses, and enforce the quota of the store at the end of a run.

A run is a Prefect flow run. All threads and workers that run its stages know its ID, and write to one record in
``<home>/runs`` (see ``store.runs``). A command that uses the store without a flow has a record until its process
ends.

``MERGEGATE_STORE_QUOTA=50GB`` limits the size of the store at the end of a run. If the variable is not set, mergegate
removes artifacts only when a command asks for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mergegate.merge_core.wording import format_bytes, parse_bytes
from mergegate.tasks.base.stage.progress import announce
from mergegate.tasks.base.stage.project import environment_setting, home
from mergegate.tasks.base.store import (
    OpenRun,
    RetentionRule,
    collect_garbage,
    forget_runs,
    open_run,
    read_runs,
    record_use,
    store_bytes,
)

QUOTA = "MERGEGATE_STORE_QUOTA"
log = logging.getLogger(__name__)


def runs_directory() -> Path:
    """Return the directory of the project's run records."""
    return home() / "runs"


def store_quota() -> int | None:
    """Return the size limit of the store in bytes, or None if there is no limit.

    Raises:
        InvalidInput: The environment variable is not a number of bytes.
    """
    setting = environment_setting(QUOTA)
    return parse_bytes(setting, QUOTA) if setting else None


@contextmanager
def record_run(profile: str) -> Iterator[OpenRun | None]:
    """Register the running flow as a run of ``profile``, and yield the run. Outside of a flow, yield None."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield None
        return
    with open_run(
        runs_directory(), str(context.flow_run.id), context.flow.name if context.flow else "", profile
    ) as run:
        yield run


def record_stage(stage: str, key: str, subject: str, *, in_run_only: bool = False) -> None:
    """Record the use of an artifact, so that it is not removed. Call this before opening the artifact.

    With ``in_run_only``, nothing is recorded outside of a flow. This is for callers that only read the artifact.
    """
    runs = runs_directory()
    run = running_flow_id()
    if run is not None and record_use(runs, run, stage, key, subject):
        return
    if run is None and not in_run_only:
        # Outside of a flow, a run represents this process. Its record is deleted on exit.
        if (process := (os.getpid(), runs)) not in _leases:
            stack = ExitStack()
            lease = f"process-{os.getpid()}-{secrets.token_hex(8)}"
            stack.enter_context(open_run(runs, lease, "command", ""))
            atexit.register(stack.close)
            _leases[process] = lease
        record_use(runs, _leases[process], stage, key, subject)


def created_bytes() -> int:
    """Return the bytes that the running flow has added to the store in all processes. 0 outside of a flow."""
    run = running_flow_id()
    return sum(record.bytes_created for record in read_runs(runs_directory(), run)) if run is not None else 0


def keep_quota() -> str:
    """Reduce the store to its quota by removing the least recently used artifacts that no run needs.

    Call this at the end of a run. Errors are logged and never fail the run. Return a one-line summary, or an empty
    string if the store was below its quota.
    """
    try:
        quota = store_quota()
        forget_runs(runs_directory())
        root = home() / "store"
        if quota is None or store_bytes(root) <= quota:
            return ""
        collected = collect_garbage(root, runs_directory(), RetentionRule(grace_s=None, quota=quota))
    except Exception as failure:
        log.warning("could not reduce the store to its quota: %s", failure)
        return ""
    size, limit = format_bytes(collected.plan.bytes_after), format_bytes(quota)
    summary = f"store: {size} of {limit}"
    if collected.plan.removals:
        summary += f"; {format_bytes(collected.bytes_freed)} of unused artifacts removed"
    if collected.plan.over_quota:
        summary += "; all other artifacts are in use (mergegate store du), so the quota is too small"
    announce(summary)
    return summary


def running_flow_id() -> str | None:
    """Return the ID of the flow run that this thread works for, also in a worker process, or None without a flow."""
    if "prefect" not in sys.modules:
        return None
    from prefect.context import FlowRunContext, TaskRunContext

    flow, task = FlowRunContext.get(), TaskRunContext.get()
    if flow is not None and flow.flow_run is not None:
        return str(flow.flow_run.id)
    if task is not None and task.task_run.flow_run_id is not None:
        return str(task.task_run.flow_run_id)
    return None


_leases: dict[tuple[int, Path], str] = {}

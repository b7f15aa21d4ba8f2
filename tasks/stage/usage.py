"""What the running flow uses of the store, noted as it goes; and a quota that is kept when it is over.

A run is what Prefect calls a flow run: its id is known in every thread and on every worker that runs a stage for it, so
all of them note in one record below ``<home>/runs`` (``tasks.store.runs``). A command that uses the store without
a flow has a lease that ends with its process.

``MERGEGATE_QUOTA=50GB`` is what the store may have when a run is over; absent, nothing is removed without a command.
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
from mergegate.tasks.stage.progress import announce
from mergegate.tasks.stage.project import home
from mergegate.tasks.store import (
    OpenRun,
    RetentionRule,
    collect_garbage,
    open_run,
    prune_runs,
    read_run,
    record_created,
    record_use,
    store_bytes,
)

QUOTA = "MERGEGATE_QUOTA"
log = logging.getLogger(__name__)


def runs_directory() -> Path:
    """Where the records of this project's runs are."""
    return home() / "runs"


def store_quota() -> int | None:
    """Bytes that the store may have; None: no limit.

    Raises:
        InvalidInput: for a setting that is no number of bytes.
    """
    said = os.environ.get(QUOTA, "").strip()
    return parse_bytes(said, QUOTA) if said else None


@contextmanager
def record_run(profile: str) -> Iterator[OpenRun | None]:
    """Register the running flow as a run of ``profile``; None outside of a flow, where there is nothing to register."""
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
    """Note that an artifact is about to be used. Call before the store is asked for it.

    Args:
        in_run_only: Without a flow it is only looked at: nothing is noted.
    """
    runs = runs_directory()
    run = _running_flow()
    if run is not None and record_use(runs, run, stage, key, subject):
        return
    if run is None and not in_run_only:
        record_use(runs, _lease_of_process(runs), stage, key, subject)


def note_artifact(size: int) -> None:
    """Note that the running flow has made an artifact.

    Args:
        size: Of its files, in bytes.
    """
    if (run := _running_flow()) is not None:
        record_created(runs_directory(), run, size)


def bytes_made() -> int:
    """What the running flow has added to the store so far, by whichever process; 0 outside of a flow."""
    run = _running_flow()
    known = read_run(runs_directory(), run) if run is not None else None
    return known.made if known else 0


def keep_quota() -> str:
    """Bring the store below its quota, the least recently used first, and nothing that anybody needs. To be called at
    the end of a run, which it never fails.

    Returns:
        What was done, in a line; empty where there was nothing to do.
    """
    try:
        quota = store_quota()
        prune_runs(runs_directory())
        root = home() / "store"
        if quota is None or store_bytes(root) <= quota:
            return ""
        done = collect_garbage(root, runs_directory(), RetentionRule(grace_s=None, quota=quota))
    except Exception as failure:
        log.warning("the store was not brought below its quota: %s", failure)
        return ""
    size, limit = format_bytes(done.plan.bytes_after), format_bytes(quota)
    said = f"store: {size} of {limit}"
    if done.plan.goes:
        said += f"; {format_bytes(done.bytes_freed)} removed that nobody needs"
    if done.plan.over_quota:
        said += "; the rest is needed (mergegate store du), so the quota is too small"
    announce(said)
    return said


def _running_flow() -> str | None:
    """Id of the flow run that this thread works for, here or on a worker of a cluster."""
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


def _lease_of_process(runs: Path) -> str:
    """The run that this process is, where no flow runs: gone with it, and nothing is kept for it afterwards."""
    if (mine := (os.getpid(), runs)) not in _leases:
        held = ExitStack()
        run = f"process-{os.getpid()}-{secrets.token_hex(8)}"
        held.enter_context(open_run(runs, run, "command", ""))
        atexit.register(held.close)
        _leases[mine] = run
    return _leases[mine]

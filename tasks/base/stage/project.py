"""Find the directories of a project, record which artifacts its runs use, and apply the settings of its store.

A run is a Prefect flow run. All threads and workers that run its stages know its ID, and write to one record in
``<home>/runs`` (see ``store.runs``). A command that uses the store without a flow has a record until its process
ends.

``MERGEGATE_STORE_QUOTA=50GB`` limits the size of the store at the end of a run. If the variable is not set, mergegate
removes artifacts only when a command asks for it.

``MERGEGATE_SHARED_STORE=s3://bucket/prefix`` sets the address of a shared store, from which artifacts are fetched that
the local store does not have. It may be any address that fsspec supports. ``MERGEGATE_SHARED_STORE_MAX_SIZE`` is the
largest size of an artifact that is shared. The default of 1 GB excludes most merges, but not scores or explanations.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from mergegate.merge_core.wording import format_bytes, parse_bytes
from mergegate.tasks.base.stage.progress import announce
from mergegate.tasks.base.store import (
    OpenRun,
    RetentionRule,
    SharedStore,
    collect_garbage,
    forget_runs,
    open_run,
    read_runs,
    record_use,
    require_shared,
    store_bytes,
)

SHARED_STORE, MAX_SIZE = "MERGEGATE_SHARED_STORE", "MERGEGATE_SHARED_STORE_MAX_SIZE"
_DEFAULT_MAX_SIZE = "1GB"
QUOTA = "MERGEGATE_STORE_QUOTA"
# Machines do not wait for each other's merges, because a merge is often too large to be shared.
_UNLEASED_STAGES = frozenset({"merge"})
log = logging.getLogger(__name__)
_leases: dict[tuple[int, Path], str] = {}  # Runs that represent this process, by its ID and the directory.


def home() -> Path:
    """Return the absolute path of the project's home directory, which may not exist yet.

    It is ``$MERGEGATE_HOME``, or ``.mergegate`` in the working directory.
    """
    return Path(os.environ.get("MERGEGATE_HOME", ".mergegate")).absolute()


def environment_setting(variable: str) -> str:
    """Return the value of an environment variable without surrounding blanks. Empty if it is not set."""
    return os.environ.get(variable, "").strip()


def nearest_directory(path: Path) -> Path:
    """Return ``path`` if it is a directory, or its closest parent that is one."""
    absolute = path.absolute()
    return next(directory for directory in (absolute, *absolute.parents) if directory.is_dir())


def shared_store(root: Path) -> SharedStore | None:
    """Return the shared store for the local store at ``root``, or None if the environment configures none."""
    address = environment_setting(SHARED_STORE)
    size = environment_setting(MAX_SIZE) or _DEFAULT_MAX_SIZE
    return _open_shared_store(address, root, size) if address else None


@contextmanager
def log_shared_store_savings() -> Iterator[None]:
    """Announce at the end of the block how many artifacts were fetched from the shared store, if any."""
    shared = shared_store(home() / "store")
    before = shared.fetch_counts.copy() if shared else None
    yield
    if shared is not None and before is not None and (arrived := shared.fetch_counts - before):
        counts = ", ".join(f"{count} of {stage}" for stage, count in sorted(arrived.items()))
        announce(f"fetched from {shared.address} instead of built: {counts}")


@cache
def _open_shared_store(address: str, root: Path, size: str) -> SharedStore:
    """Return the client for this address. There is one per process, because it owns a thread and connections."""
    require_shared(address, SHARED_STORE)
    return SharedStore(address, root, parse_bytes(size, MAX_SIZE), _UNLEASED_STAGES)


def runs_directory() -> Path:
    """Return the directory of the project's run records."""
    return home() / "runs"


def store_quota() -> int | None:
    """Return the size limit of the store in bytes, or None if there is no limit."""
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
    flow = context.flow.name if context.flow else ""
    with open_run(runs_directory(), str(context.flow_run.id), flow, profile) as run:
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

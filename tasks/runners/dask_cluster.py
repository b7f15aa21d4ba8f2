"""Run Prefect tasks on Dask: on a cluster that mergegate starts on this machine, or on an existing one.

Anyone who can reach a scheduler's port can execute code, so mergegate's own cluster listens only on the loopback
interface and uses TLS with a temporary certificate. Each worker has one thread, and no memory limit because its child
processes use the memory.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

import dask
from distributed import KilledWorker, LocalCluster
from prefect_dask.task_runners import DaskTaskRunner

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.runners.contract import outcome_of
from mergegate.tasks.runners.slots import end_slot

if TYPE_CHECKING:
    from prefect import Task

_LOGGERS = ("distributed", "distributed.worker", "distributed.nanny", "distributed.scheduler", "distributed.core")
_PATIENCE_S = 60.0
_log = logging.getLogger(__name__)


class DaskCluster:
    """A Dask cluster with one Prefect task runner for the whole run.

    The task runner's context is not yet entered. ``resources`` are closed with the cluster.
    """

    def __init__(self, runner: DaskTaskRunner, resources: ExitStack, *, is_own: bool) -> None:
        _silence_loggers()
        self._resources, self._is_own = resources, is_own
        self._runner = resources.enter_context(runner)
        self._client = self._runner.client
        self.workers = max(1, len(self._client.scheduler_info(n_workers=-1)["workers"]))

    @classmethod
    def start(cls, workers: int, tries: int, environment: Mapping[str, str]) -> Self:
        """Start a cluster of worker processes on this machine, with additional environment variables.

        ``tries`` is the number of attempts for an item whose workers die.
        """
        _silence_loggers()
        with ExitStack() as resources:
            resources.enter_context(
                dask.config.set(
                    {
                        "logging": dict.fromkeys(_LOGGERS, "critical"),
                        "distributed.scheduler.allowed-failures": tries - 1,
                        "distributed.scheduler.worker-saturation": 1.0,  # no items queue at a worker
                        "distributed.diagnostics.nvml": False,
                    }
                )
            )
            directory = tempfile.TemporaryDirectory(prefix="mergegate-dask-", ignore_cleanup_errors=True)
            cluster = resources.enter_context(
                LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    processes=True,
                    host="127.0.0.1",
                    dashboard_address="127.0.0.1:0",
                    security=True,
                    memory_limit=0,
                    silence_logs=logging.CRITICAL,
                    local_directory=resources.enter_context(directory),
                    env=dict(environment),
                )
            )
            return cls(DaskTaskRunner(cluster=cluster), resources.pop_all(), is_own=True)
        raise AssertionError

    @classmethod
    def connect(cls, address: str) -> Self:
        """Connect to the cluster whose scheduler is at ``address``.

        Raises:
            InvalidInput: No scheduler answers at ``address``.
        """
        with ExitStack() as resources:
            try:
                cluster = cls(
                    DaskTaskRunner(address=address, client_kwargs={"timeout": _PATIENCE_S}), resources, is_own=False
                )
            except (OSError, TimeoutError, ValueError) as error:
                raise InvalidInput(
                    f"runner.address: {address}",
                    found=f"no Dask scheduler answers there ({error})",
                    expected="the address that the scheduler printed, such as tcp://host:8786",
                ) from None
            cluster._resources = resources.pop_all()
            return cluster
        raise AssertionError

    def submit(self, task: Task[..., Any], order: bytes, on_outcome: Callable[[Any], None]) -> Any:
        def death(error: BaseException) -> str:
            return f"{error.allowed_failures + 1} workers died" if isinstance(error, KilledWorker) else ""

        if self._is_own:
            # If a worker has just died, wait for its replacement. Otherwise two items would queue at one worker.
            with suppress(TimeoutError):
                self._client.wait_for_workers(self.workers, timeout=_PATIENCE_S)
        future = self._runner.submit(task, {"order": order}).wrapped_future
        # Fetch the result immediately: Dask recomputes results that are lost with a worker.
        future.add_done_callback(lambda completed: on_outcome(outcome_of(completed, death)))
        return future

    def cancel(self, future: Any) -> None:
        with suppress(Exception):
            future.cancel()

    def close(self) -> None:
        if not self._is_own:
            with suppress(Exception):  # the cluster keeps running, but its workers release their resources
                self._client.run(end_slot, 0)
        try:
            self._resources.close()
        except Exception as error:
            # Dask complains about workers that are already gone. All work is done, so only log it.
            _log.info("the Dask cluster reported an error while it was closed: %r", error)


def _silence_loggers() -> None:
    """Silence Dask's loggers, which write to the terminal regardless of the settings of a cluster."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)

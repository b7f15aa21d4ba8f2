"""Dask, behind Prefect's task runner for it: a cluster of ours on this machine, or the one at an address.

A cluster of ours listens on the loopback only and speaks TLS with a certificate that it makes for itself: whoever
reaches the port of a scheduler can have anything run. One thread a worker; it holds no memory limit over them, since
what takes memory are their children.
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
from mergegate.tasks.runners.cluster import WorkerLost
from mergegate.tasks.runners.slots import end_slot

if TYPE_CHECKING:
    from prefect import Task

_LOGGERS = ("distributed", "distributed.worker", "distributed.nanny", "distributed.scheduler", "distributed.core")
_PATIENCE_S = 60.0
_log = logging.getLogger(__name__)


class DaskCluster:
    """A cluster, and Prefect's runner of tasks on it, started once.

    Args:
        runner: Not entered yet.
        held: What is ended with it.
        ours: Whether the cluster was started here.
    """

    def __init__(self, runner: DaskTaskRunner, held: ExitStack, *, ours: bool) -> None:
        _hush()
        self._held, self._ours = held, ours
        self._runner = held.enter_context(runner)
        self._client = self._runner.client
        self.workers = max(1, len(self._client.scheduler_info(n_workers=-1)["workers"]))

    @classmethod
    def here(cls, workers: int, tries: int, environment: Mapping[str, str]) -> Self:
        """Start one on this machine.

        Args:
            workers: Processes.
            tries: Of an item whose workers die.
            environment: What the workers see beside what we see.
        """
        _hush()
        with ExitStack() as held:
            held.enter_context(
                dask.config.set(
                    {
                        "logging": dict.fromkeys(_LOGGERS, "critical"),
                        "distributed.scheduler.allowed-failures": tries - 1,
                        "distributed.scheduler.worker-saturation": 1.0,  # nobody waits at a worker
                        "distributed.diagnostics.nvml": False,
                    }
                )
            )
            place = tempfile.TemporaryDirectory(prefix="mergegate-dask-", ignore_cleanup_errors=True)
            cluster = held.enter_context(
                LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    processes=True,
                    host="127.0.0.1",
                    dashboard_address="127.0.0.1:0",
                    security=True,
                    memory_limit=0,
                    silence_logs=logging.CRITICAL,
                    local_directory=held.enter_context(place),
                    env=dict(environment),
                )
            )
            return cls(DaskTaskRunner(cluster=cluster), held.pop_all(), ours=True)
        raise AssertionError

    @classmethod
    def at(cls, address: str) -> Self:
        """Join the one whose scheduler is at ``address``.

        Raises:
            InvalidInput: when nobody answers there.
        """
        with ExitStack() as held:
            try:
                joined = cls(DaskTaskRunner(address=address, client_kwargs={"timeout": _PATIENCE_S}), held, ours=False)
            except (OSError, TimeoutError, ValueError) as error:
                raise InvalidInput(
                    f"runner.address: {address}",
                    found=f"no scheduler of Dask ({error})",
                    expected="its address, as it printed it: tcp://host:8786",
                ) from None
            joined._held = held.pop_all()
            return joined
        raise AssertionError

    def submit(self, task: Task[..., Any], order: bytes, done: Callable[[Any], None]) -> Any:
        def told(future: Any) -> None:
            # At once: what lies at a worker is made again when that dies.
            try:
                done(future.result())
            except KilledWorker as error:
                done(WorkerLost(f"{error.allowed_failures + 1} workers"))
            except BaseException as error:
                done(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        if self._ours:
            # Where one has just died, both of two items would go to the other, one waiting there for the other's end.
            with suppress(TimeoutError):
                self._client.wait_for_workers(self.workers, timeout=_PATIENCE_S)
        future = self._runner.submit(task, {"order": order}).wrapped_future
        future.add_done_callback(told)
        return future

    def cancel(self, submitted: Any) -> None:
        with suppress(Exception):
            submitted.cancel()

    def close(self) -> None:
        if not self._ours:
            with suppress(Exception):  # theirs goes on; what their workers keep for us need not
                self._client.run(end_slot, 0)
        try:
            self._held.close()
        except Exception as error:
            # Of its own account of workers that are gone already: all that was asked of it is done.
            _log.info("Dask's cluster did not end quietly: %r", error)


def _hush() -> None:
    """Its loggers write to our terminal whatever they are told when a cluster is made."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)

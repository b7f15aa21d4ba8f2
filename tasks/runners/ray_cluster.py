"""Run Prefect tasks on Ray: on an instance that mergegate starts on this machine, or on an existing one.

Prefect's runner would start and stop Ray with every flow, and hangs the second time. So mergegate starts Ray once, and
the runner uses the running instance. Each item has its own process with one core, or with one GPU if the machine has
any (Ray then sets CUDA_VISIBLE_DEVICES).

Ray listens on the machine's own address regardless of its settings, and anyone who can reach it can execute code. So
mergegate's own instance requires a token, which exists only in the environment of the processes that mergegate starts.
Ray reads its environment on import, so ``cluster`` sets it before it imports this module.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

import ray
from prefect_ray.context import remote_options
from prefect_ray.task_runners import RayTaskRunner

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.runners.contract import outcome_of

if TYPE_CHECKING:
    from prefect import Task

_DEATHS = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError)
_MEMORY = 100 << 20  # bytes for Ray's object store: orders and answers are small


class RayCluster:
    """A Ray instance with one Prefect task runner for the whole run.

    ``tries`` is the number of attempts for an item whose workers die, or None for Ray's default. ``resources`` are
    closed with the instance.
    """

    def __init__(self, tries: int | None, resources: ExitStack) -> None:
        self._resources = resources
        self._runner = resources.enter_context(RayTaskRunner())
        capacity = ray.cluster_resources()
        gpus = int(capacity.get("GPU", 0))
        self.workers = max(1, gpus or int(capacity.get("CPU", 1)))
        self._options: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        if tries is not None:
            self._options["max_retries"] = tries - 1

    @classmethod
    def start(cls, workers: int, tries: int, environment: Mapping[str, str]) -> Self:
        """Start an instance on this machine. The parameters are those of ``DaskCluster.start``."""
        with ExitStack() as resources:
            # Socket paths are limited to 107 characters, and Ray's own part is long.
            temporary = tempfile.TemporaryDirectory(prefix="mg-ray-", dir="/tmp", ignore_cleanup_errors=True)
            directory = resources.enter_context(temporary)
            resources.callback(_shut_down)
            _init(
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=_MEMORY,
                runtime_env={"env_vars": dict(environment)},
                _temp_dir=directory,
            )
            return cls(tries, resources.pop_all())
        raise AssertionError

    @classmethod
    def connect(cls, address: str) -> Self:
        """Connect to the instance at ``address``.

        Raises:
            InvalidInput: No instance answers at ``address``.
        """
        with ExitStack() as resources:
            resources.callback(_shut_down)  # closes the connection
            try:
                _init(address=address)
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise InvalidInput(
                    f"runner.address: {address}",
                    found=f"no Ray cluster answers there ({' '.join(str(error).split())[:200]})",
                    expected="host:6379 on a machine of the cluster, ray://host:10001 from another machine, or auto",
                ) from None
            return cls(None, resources.pop_all())
        raise AssertionError

    def submit(self, task: Task[..., Any], order: bytes, on_outcome: Callable[[Any], None]) -> Any:
        def death(error: BaseException) -> str:
            return type(error).__name__ if isinstance(error, _DEATHS) else ""

        with remote_options(**self._options):
            reference = self._runner.submit(task, {"order": order}).wrapped_future
        reference.future().add_done_callback(lambda completed: on_outcome(outcome_of(completed, death)))
        return reference

    def cancel(self, future: Any) -> None:
        with suppress(Exception):
            ray.cancel(future, force=True)

    def close(self) -> None:
        self._resources.close()


def _shut_down() -> None:
    """Shut down Ray's connection.

    Ray ends the whole process if another thread drops the last reference to a result during the shutdown, which garbage
    collection can cause. So collect garbage first, and disable it until the shutdown is complete.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if was_enabled:
            gc.enable()


def _init(**options: Any) -> None:
    # Ray prints messages about workers to stdout, which another program may be parsing.
    with suppress(AttributeError):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    ray.init(
        namespace="mergegate",
        configure_logging=True,
        logging_level=logging.CRITICAL,
        log_to_driver=False,
        **options,
    )

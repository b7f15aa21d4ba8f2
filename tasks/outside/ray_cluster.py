"""Ray, behind Prefect's task runner for it: an instance of ours on this machine, or the one at an address.

Prefect's runner would start and end Ray with every flow, and hangs the second time; so it is started here, once, and
the runner finds it running and leaves it alone. Each item has a process to itself, with one core, or one GPU where
there are any (then Ray sets CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

from merge_core.errors import InvalidInput
from tasks.outside.cluster import WorkerLost

# Read when it is imported, here and in everything that it starts: nothing is told to anybody, no secret is written into
# the user's home, and a machine that is busy may take its time.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_enable_metrics_collection": "0",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
from prefect_ray.context import remote_options  # noqa: E402
from prefect_ray.task_runners import RayTaskRunner  # noqa: E402

if TYPE_CHECKING:
    from prefect import Task

_MEMORY = 100 << 20  # bytes for objects: orders and answers are small


class RayCluster:
    """An instance, and Prefect's runner of tasks on it, started once.

    Args:
        tries: Of an item whose workers die; None: Ray's own number.
        held: What is ended with it.
    """

    def __init__(self, tries: int | None, held: ExitStack) -> None:
        self._held = held
        self._runner = held.enter_context(RayTaskRunner())
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self.workers = max(1, gpus or int(resources.get("CPU", 1)))
        self._options: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        if tries is not None:
            self._options["max_retries"] = tries - 1

    @classmethod
    def here(cls, workers: int, tries: int, environment: Mapping[str, str]) -> Self:
        """Start one on this machine. Arguments as of ``DaskCluster.here``."""
        with ExitStack() as held:
            # Names of sockets have 107 characters, of which Ray takes most.
            place = held.enter_context(tempfile.TemporaryDirectory(prefix="mg-ray-", dir="/tmp", ignore_cleanup_errors=True))
            held.callback(ray.shutdown)
            _init(
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=_MEMORY,
                runtime_env={"env_vars": dict(environment)},
                _node_ip_address="127.0.0.1",
                _temp_dir=place,
            )
            return cls(tries, held.pop_all())
        raise AssertionError

    @classmethod
    def at(cls, address: str) -> Self:
        """Join the one at ``address``.

        Raises:
            InvalidInput: when nobody answers there.
        """
        with ExitStack() as held:
            held.callback(ray.shutdown)  # of our connection
            try:
                _init(address=address)
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise InvalidInput(
                    f"runner.address: {address}",
                    found=f"no cluster of Ray ({' '.join(str(error).split())[:200]})",
                    expected="host:6379 of its head from one of its machines, ray://host:10001 from elsewhere, or auto",
                ) from None
            return cls(None, held.pop_all())
        raise AssertionError

    def submit(self, task: Task[..., Any], order: bytes, done: Callable[[Any], None]) -> Any:
        def told(future: Any) -> None:
            try:
                done(future.result())
            except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError) as error:
                done(WorkerLost(type(error).__name__))
            except BaseException as error:
                done(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        with remote_options(**self._options):
            reference = self._runner.submit(task, {"order": order}).wrapped_future
        reference.future().add_done_callback(told)
        return reference

    def cancel(self, submitted: Any) -> None:
        with suppress(Exception):
            ray.cancel(submitted, force=True)

    def close(self) -> None:
        self._held.close()


def _init(**options: Any) -> None:
    ray.init(
        namespace="mergegate",
        configure_logging=True,
        logging_level=logging.CRITICAL,
        log_to_driver=False,
        **options,
    )

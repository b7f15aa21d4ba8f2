"""Ray, behind Prefect's task runner for it: an instance of ours on this machine, or the one at an address.

Prefect's runner would start and end Ray with every flow, and hangs the second time; so it is started here, once, and
the runner finds it running and leaves it alone. Each item has a process to itself, with one core, or one GPU where
there are any (then Ray sets CUDA_VISIBLE_DEVICES).

It listens on the machine's own address, whatever it is told, and whoever reaches it can have anything run: so an
instance of ours wants a token, which is in the environment of what we start and nowhere else. Ray looks at its own
environment when it is imported, so that is prepared before this file is (``ray_environment``).
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
from mergegate.tasks.runners.cluster import WorkerLost

if TYPE_CHECKING:
    from prefect import Task

_LOST = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError)
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
            place = tempfile.TemporaryDirectory(prefix="mg-ray-", dir="/tmp", ignore_cleanup_errors=True)
            directory = held.enter_context(place)
            held.callback(_shut_down)
            _init(
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=_MEMORY,
                runtime_env={"env_vars": dict(environment)},
                _temp_dir=directory,
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
            held.callback(_shut_down)  # of our connection
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
            except _LOST as error:
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


def _shut_down() -> None:
    """End Ray here. It ends the whole process when the last reference to a result goes in another thread meanwhile, as
    it does where that thread looks for cycles: so they are looked for now, and then not until it is over."""
    gc.collect()
    looking = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if looking:
            gc.enable()


def _init(**options: Any) -> None:
    # What it has to say of workers it would print among what we print, where a program may be reading.
    with suppress(AttributeError):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    ray.init(
        namespace="mergegate",
        configure_logging=True,
        logging_level=logging.CRITICAL,
        log_to_driver=False,
        **options,
    )

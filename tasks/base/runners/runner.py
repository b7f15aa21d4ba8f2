"""Process independent items in parallel: in local threads, or on a Dask or Ray cluster, with identical results.

::

    runner: {kind: local, workers: 2}                            # in a profile
    runner: {kind: dask, address: "tcp://10.0.0.1:8786"}

    with open_runner(profile.runner) as runner:
        for index, result in runner.run_each(function, items):   # in order of completion
            ...                                                  # the result of a failed item is its exception

``local`` uses threads of this process, each with its own slot (``slots``) and therefore its own model process. It
creates no Prefect tasks, because a task costs as much as a small trial. ``dask`` and ``ray`` are in ``cluster``. A
cluster that mergegate starts runs until the runner closes; a cluster at an ``address`` is left running.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.system import cores_of_process
from mergegate.tasks.base.runners.slots import WorkerSlot, end_slot, slots_for, use_slot, visible_gpus

I = TypeVar("I")  # noqa: E741  # an item; R its result
R = TypeVar("R")


class RunnerSettings(BaseModel):
    """Where independent work runs, in a profile under ``runner``.

    The runner affects the duration of a run but not its results, so it is not part of any key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["local", "dask", "ray"] = Field(default="local", description="This machine, or a cluster.")
    workers: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Number of items that run in parallel. Default: 1 for local, all workers of the cluster at "
        "`address`, or one per GPU or core for a cluster that mergegate starts.",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        description="Address of an existing cluster: tcp://host:8786 of Dask's scheduler, or host:6379, "
        "ray://host:10001 or auto for Ray. Default: mergegate starts a cluster on this machine.",
    )

    @property
    def parallel_items(self) -> int:
        """Number of items that run in parallel. 1 if only the cluster knows the number."""
        return self.workers or 1

    def __str__(self) -> str:
        """Return the kind and the number of workers, for example ``local, 2 at a time``, without the address."""
        if self.workers is None and self.kind != "local":
            return self.kind
        return f"{self.kind}, {self.parallel_items} at a time"

    @model_validator(mode="after")
    def _require_cluster_for_address(self) -> Self:
        if self.address is not None and self.kind == "local":
            raise ValueError("kind: local does not accept an address. Remove it, or set kind: dask or kind: ray")
        return self


class Runner(Protocol):
    """Runner of independent items."""

    @property
    def is_parallel(self) -> bool:
        """Whether several items run in parallel."""

    def run_each(self, function: Callable[[I], R], items: Sequence[I]) -> Iterator[tuple[int, R | Exception]]:
        """Call ``function`` for each item. Yield the item's index with the result or exception, in order of completion.

        Closing the iterator cancels the items in progress. ``function`` is a module-level function. It and the items
        must be picklable. A call must be safe to repeat, because an item whose worker dies is processed again.
        """


@contextmanager
def open_runner(settings: RunnerSettings) -> Iterator[Runner]:
    """Open a runner for the duration of the block.

    Raises:
        InvalidInput: A required package is not installed. Also raised for the first items, if the cluster is
            unreachable or cannot be started.
    """
    if settings.kind == "local":
        local = LocalRunner(settings.workers or 1)
        try:
            yield local
        finally:
            local.close()
        return
    package = {"dask": "prefect_dask", "ray": "prefect_ray"}[settings.kind]
    if find_spec(package) is None:
        raise InvalidInput(
            f"runner.kind: {settings.kind}",
            found=f"{package} is not installed",
            remedy=f"{pip_command(f'mergegate[{settings.kind}]')}, on this machine and on every machine with workers",
        )
    from mergegate.tasks.base.runners.cluster import ClusterRunner

    workers = settings.workers or (None if settings.address else len(visible_gpus()) or cores_of_process())
    cluster = ClusterRunner(settings.kind, workers, settings.address)
    try:
        yield cluster
    finally:
        cluster.close()


def local_runner() -> Runner:
    """Return a runner that processes the items one by one in the current thread."""
    return LocalRunner(1)


class LocalRunner:
    """Runner that processes items in threads of this process, or in the current thread if ``workers`` is 1."""

    def __init__(self, workers: int) -> None:
        self._slots = slots_for(workers, cores_of_process())

    @property
    def is_parallel(self) -> bool:
        return len(self._slots) > 1

    def run_each(self, function: Callable[[I], R], items: Sequence[I]) -> Iterator[tuple[int, R | Exception]]:
        if not self.is_parallel:
            for index, item in enumerate(items):
                yield index, _call(function, item)
            return
        waiting = iter(list(enumerate(items)))
        lock = threading.Lock()
        outcomes: SimpleQueue[tuple[int, R | BaseException]] = SimpleQueue()
        cancelled = threading.Event()

        def work(slot: WorkerSlot) -> None:
            with use_slot(WorkerSlot(slot.number, slot.environment, cancelled)):
                while not cancelled.is_set():
                    with lock:
                        index, item = next(waiting, (-1, None))
                    if index < 0:
                        return
                    try:
                        outcomes.put((index, _call(function, item)))  # type: ignore[arg-type]  # None at the end only
                    except BaseException as error:  # the run is being stopped: re-raise it in the calling thread
                        outcomes.put((index, error))

        # The threads inherit the caller's context: the running flow and the progress watcher.
        threads = [
            threading.Thread(target=copy_context().run, args=(work, slot), name=f"runner-{slot.number}", daemon=True)
            for slot in self._slots[: len(items)]
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in items:
                index, result = outcomes.get()
                if isinstance(result, BaseException) and not isinstance(result, Exception):
                    raise result
                yield index, result
        finally:
            cancelled.set()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """Release the resources of all slots except the first, which the process uses even without a runner."""
        for slot in self._slots[1:]:
            end_slot(slot.number)


def _call(function: Callable[[I], R], item: I) -> R | Exception:
    try:
        return function(item)
    except Exception as error:
        return error

"""Independent work side by side: in threads here, or on a Dask or Ray cluster. The results are the same everywhere.

::

    runner: {kind: local, workers: 2}                            # in a profile
    runner: {kind: dask, address: "tcp://10.0.0.1:8786"}

    with open_runner(profile.runner) as runner:
        for at, result in runner.each(function, items):          # as they finish; at: place of the item in ``items``
            ...                                                  # an item that failed: its exception, as a value

``local`` is threads of this process, each at a place of its own (``slots``), so that what one asks of models it asks of
a process of its own; a task of Prefect costs as much as a small trial, so it makes none. ``dask`` and ``ray`` are in
``cluster``. A cluster of ours is started when it is first needed, once, and is gone at the end; one at an ``address``
is used and left as it is.
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

from mergegate.merge_core.engine import usable_cores
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.runners.slots import WorkerSlot, end_slot, slots_for, use_slot, visible_gpus

I = TypeVar("I")  # noqa: E741  # an item; R its result
R = TypeVar("R")


class RunnerSettings(BaseModel):
    """Where independent work is done, in a profile under ``runner``. Decides how long it takes, never what comes out,
    so it is in no key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["local", "dask", "ray"] = "local"
    workers: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="So many at a time; absent: one for local, else all of the cluster's, or one a GPU or core.",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        description="Of a cluster that is there: tcp://host:8786 of Dask's scheduler; host:6379, ray://host:10001 or "
        "auto of Ray. Absent: one is started on this machine.",
    )

    @property
    def at_a_time(self) -> int:
        """So many items, as far as that is known before a cluster is asked; at least 1."""
        return self.workers or 1

    def __str__(self) -> str:
        """``local, 2 at a time``; where they run is not said: it is an address."""
        if self.workers is None and self.kind != "local":
            return self.kind
        return f"{self.kind}, {self.at_a_time} at a time"

    @model_validator(mode="after")
    def _only_a_cluster_has_an_address(self) -> Self:
        if self.address is not None and self.kind == "local":
            raise ValueError("local has no address: say kind: dask or kind: ray")
        return self


class Runner(Protocol):
    """Who has independent work done."""

    @property
    def side_by_side(self) -> bool:
        """Whether anything is gained by giving it several items at once."""

    def each(self, function: Callable[[I], R], items: Sequence[I]) -> Iterator[tuple[int, R | Exception]]:
        """``function`` of every item, as they finish: place in ``items``, and the result, or what it raised.

        Whoever stops asking gives up what is under way.

        Args:
            function: Of a module; it and the items must be picklable. May be called twice for one item, if a worker
                dies: it is to do no harm then.
        """


@contextmanager
def open_runner(settings: RunnerSettings) -> Iterator[Runner]:
    """A runner, for as long as the block takes.

    Raises:
        InvalidInput: where what it needs is not installed; later, where the cluster cannot be reached or started.
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
            remedy=f"pip install 'mergegate[{settings.kind}]', here and wherever its workers are",
        )
    from mergegate.tasks.runners.cluster import ClusterRunner

    workers = settings.workers or (None if settings.address else len(visible_gpus()) or usable_cores())
    cluster = ClusterRunner(settings.kind, workers, settings.address)
    try:
        yield cluster
    finally:
        cluster.close()


def local_runner() -> Runner:
    """One after another, in this thread."""
    return LocalRunner(1)


class LocalRunner:
    """In threads of this process.

    Args:
        workers: So many. One: no thread is made.
    """

    def __init__(self, workers: int) -> None:
        self._slots = slots_for(workers, usable_cores())

    @property
    def side_by_side(self) -> bool:
        return len(self._slots) > 1

    def each(self, function: Callable[[I], R], items: Sequence[I]) -> Iterator[tuple[int, R | Exception]]:
        if not self.side_by_side:
            for at, item in enumerate(items):
                yield at, _attempted(function, item)
            return
        waiting = iter(list(enumerate(items)))
        taking = threading.Lock()
        done: SimpleQueue[tuple[int, R | BaseException]] = SimpleQueue()
        nobody_waits = threading.Event()

        def work(place: WorkerSlot) -> None:
            with use_slot(WorkerSlot(place.number, place.environment, nobody_waits)):
                while not nobody_waits.is_set():
                    with taking:
                        at, item = next(waiting, (-1, None))
                    if at < 0:
                        return
                    try:
                        done.put((at, _attempted(function, item)))  # type: ignore[arg-type]  # None at the end only
                    except BaseException as error:  # of whoever ends the run: to be raised where it is waited for
                        done.put((at, error))

        # What holds where we are called (the running flow, who watches) holds there.
        threads = [
            threading.Thread(target=copy_context().run, args=(work, place), name=f"runner-{place.number}", daemon=True)
            for place in self._slots[: len(items)]
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in items:
                at, result = done.get()
                if isinstance(result, BaseException) and not isinstance(result, Exception):
                    raise result
                yield at, result
        finally:
            nobody_waits.set()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """Let go of what is kept at the places that a run without a runner does not have."""
        for place in self._slots[1:]:
            end_slot(place.number)


def _attempted(function: Callable[[I], R], item: I) -> R | Exception:
    try:
        return function(item)
    except Exception as error:
        return error

"""Work on a Dask or Ray cluster: each item an uncached task of Prefect, submitted through Prefect's own task runners.

What travels there is bytes that only we look into: function and item, under which home they are to work, and how we
know that the home is the same there. What comes back: the result or the exception, and what the stages that ran there
would have told whoever watches.

Workers speak to the API that we speak to. A cluster of ours gets its address, our homes and our secret for it in its
environment, before anything there imports Prefect; on one that was there before, Prefect's own context brings them,
and the API must be one that other machines can reach. A worker that dies in the middle costs its item another try; an
item whose workers die every time is given up with an error of its own.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkstemp
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from mergegate.merge_core.engine import usable_cores
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import state_directory
from mergegate.tasks.runners.slots import WorkerSlot, gpu_of_worker, threads_of_worker, use_slot, visible_gpus
from mergegate.tasks.stage import DeferredProgress, StageEnd, home, progress_watcher, relay_progress

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State

I = TypeVar("I")  # noqa: E741  # an item; R its result
R = TypeVar("R")

# The directory that workers import mergegate from: the checkout, or site-packages.
ROOT = Path(__file__).parents[3]
# What a worker of ours sees of a setting only if it says so in its environment: it has no other way to us.
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0")
_TRIES = 2  # of an item, where workers of ours die


class WorkerLost(Exception):
    """The workers that an item was given to died."""


class Cluster(Protocol):
    """Dask or Ray, as far as it is needed here."""

    workers: int  # items that it does at a time

    def submit(self, task: Task[..., Any], order: bytes, done: Callable[[Any], None]) -> Any:
        """Have ``task(order)`` run; ``done`` is told, in whatever thread, the state of the task, or the exception
        that came in its place. Returns what ``cancel`` takes."""

    def cancel(self, submitted: Any) -> None:
        """Nobody waits for it any more; what runs already may go on."""

    def close(self) -> None:
        """End what is ours."""


@dataclass(frozen=True)
class _Order:
    """An item, as it travels.

    Args:
        home: Of our state; the same path there.
        mark: A file in it that is there for as long as the runner is: who cannot see it has another home.
        of_ours: Whether the worker was started by us, on this machine.
    """

    function: Callable[[Any], Any]
    item: Any
    home: Path
    mark: Path
    of_ours: bool


@dataclass(frozen=True)
class _Done:
    """What comes back of it."""

    result: Any
    failed: bool
    stages: tuple[StageEnd, ...]


class ClusterRunner:
    """On a cluster, which is started or joined when there is something to do.

    Args:
        kind: ``dask`` or ``ray``.
        workers: Items at a time; None: as many as the cluster has workers.
        address: Of a cluster that is there; None: one is started here.
    """

    side_by_side = True

    def __init__(self, kind: str, workers: int | None, address: str | None) -> None:
        self._kind, self._workers, self._address = kind, workers, address
        self._cluster: Cluster | None = None
        self._mark: Path | None = None

    def each(self, function: Callable[[I], R], items: Sequence[I]) -> Iterator[tuple[int, R | Exception]]:
        if not items:
            return
        cluster, mark = self._started()
        done: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        waiting = iter(enumerate(items))
        running: dict[int, Any] = {}

        def told(at: int, state: Any) -> None:
            done.put((at, state))

        def submit_next() -> None:
            if (one := next(waiting, None)) is not None:
                at, item = one
                order = pickle.dumps(_Order(function, item, home(), mark, self._address is None))
                running[at] = cluster.submit(_task(), order, partial(told, at))

        try:
            # No more than are worked on: who waits at a worker would be taken for guilty of its death.
            for _ in range(min(self._workers or cluster.workers, len(items))):
                submit_next()
            while running:
                at, state = done.get()
                del running[at]
                submit_next()
                yield at, self._result(at, state)
        finally:
            for submitted in running.values():
                cluster.cancel(submitted)

    def close(self) -> None:
        """End what is ours, and leave what is not."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)
            self._mark = None

    def _started(self) -> tuple[Cluster, Path]:
        if self._cluster is None or self._mark is None:
            api = _api()
            if self._address is not None:
                _require_reachable(api.get("PREFECT_API_URL", ""), self._address)
            descriptor, name = mkstemp(dir=state_directory(home()), prefix="runner-", suffix=".partial")
            os.close(descriptor)
            self._mark = Path(name)
            self._cluster = self._start(api)
        return self._cluster, self._mark

    def _start(self, api: Mapping[str, str]) -> Cluster:
        workers = self._workers or 1
        environment = {
            **api,
            **threads_of_worker(workers, usable_cores()),
            "MERGEGATE_HOME": str(home()),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        if self._kind == "dask":
            from mergegate.tasks.runners.dask_cluster import DaskCluster

            return DaskCluster.at(self._address) if self._address else DaskCluster.here(workers, _TRIES, environment)
        if "ray" not in sys.modules:  # else it has made up its mind
            for name, value in ray_environment(ours=self._address is None).items():
                os.environ.setdefault(name, value)
        from mergegate.tasks.runners.ray_cluster import RayCluster

        return RayCluster.at(self._address) if self._address else RayCluster.here(workers, _TRIES, environment)

    def _result(self, at: int, state: Any) -> Any:
        where = f"runner {self._kind}: item {at}"
        if isinstance(state, WorkerLost):
            return InvalidInput(
                where,
                found=f"its worker died each time: {state}",
                expected="a worker that lives until it is done",
                remedy="look for what kills it: memory, mostly; fewer workers leave each of them more",
            )
        answer = state
        if not isinstance(state, Exception):
            answer = state.result(raise_on_failure=False, _sync=True)
        if isinstance(answer, Exception):
            return answer
        if not isinstance(answer, bytes):
            return InvalidInput(where, found=f"{state!r}", expected="an answer")
        done: _Done = pickle.loads(answer)  # by a worker, which runs our code and has our secret
        relay_progress(done.stages)
        return done.result


@cache
def _task() -> Task[..., Any]:
    """Made when it is first needed: importing this does not import Prefect."""
    from prefect import Task
    from prefect.cache_policies import NO_CACHE

    return Task(fn=carry_out, name="item", cache_policy=NO_CACHE, persist_result=False)


def carry_out(order: bytes) -> State[bytes]:
    """In a worker: what was ordered."""
    from prefect.states import Completed, Failed

    sent: _Order = pickle.loads(order)
    held = DeferredProgress()
    failed = True
    result: Any
    try:
        os.environ["MERGEGATE_HOME"] = str(sent.home)
        _require_shared(sent)
        with progress_watcher(held), use_slot(_slot_of_worker() if sent.of_ours else WorkerSlot(scheduled=True)):
            result = sent.function(sent.item)
        failed = False
    except Exception as error:
        result = error
    answer = _packed(_Done(result, failed, held.stages))
    if failed:
        return Failed(message=f"{type(result).__name__}: {result}", data=answer)
    return Completed(data=answer)


def _packed(done: _Done) -> bytes:
    try:
        packed = pickle.dumps(done)
        if done.failed:
            pickle.loads(packed)  # an exception that takes other arguments than it keeps is found out only here
        return packed
    except Exception:
        if not done.failed:
            raise
        return pickle.dumps(_Done(RuntimeError(f"{type(done.result).__name__}: {done.result}"), True, done.stages))


def _slot_of_worker() -> WorkerSlot:
    """On a cluster of ours, which has one machine: each of Dask's workers sees one of its GPUs; Ray shares them out
    itself. On others whoever started the workers has said what they see."""
    with suppress(ImportError, ValueError):
        from distributed import get_worker

        seen = gpu_of_worker(int(get_worker().name), visible_gpus())
        return WorkerSlot(environment=tuple(seen.items()), scheduled=True)
    return WorkerSlot(scheduled=True)


def _require_shared(sent: _Order) -> None:
    if not sent.mark.exists():
        raise InvalidInput(
            f"a worker on {socket.gethostname()}",
            found=f"another directory at {sent.home}",
            expected="the one that the run has there: all machines share it, under one path",
            remedy="mount it there, or point MERGEGATE_HOME to what they share",
        )


def _require_reachable(api: str, address: str) -> None:
    """See that workers elsewhere do not look for the API on their own machine."""
    there = urlsplit(address if "://" in address else f"//{address}").hostname or ""
    if address == "auto" or _LOOPBACK.fullmatch(there) or there == socket.gethostname():
        return
    if not api or _LOOPBACK.fullmatch(urlsplit(api).hostname or ""):
        raise InvalidInput(
            f"runner.address: {address}",
            found=f"Prefect's API at {api or 'no address'}, which is reached from this machine only",
            expected="a Prefect server that the workers reach",
            remedy="start one that listens for them (prefect server start --host …), and set PREFECT_API_URL",
        )


def ray_environment(*, ours: bool) -> dict[str, str]:
    """What Ray reads when it is imported, here and in all that it starts: nothing is told to anybody, and a machine
    that is busy may take its time. Of ours: a token, so that none is written into the user's home."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "300"}
    return quiet | ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if ours else {})


def _api() -> dict[str, str]:
    """How to reach the API that this run uses, as environment."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    found = {"PREFECT_HOME": str(settings.home)}
    if settings.api.url:
        found["PREFECT_API_URL"] = settings.api.url
    for name, secret in (("AUTH_STRING", settings.api.auth_string), ("KEY", settings.api.key)):
        if secret is not None:
            found[f"PREFECT_API_{name}"] = secret.get_secret_value()
    return found

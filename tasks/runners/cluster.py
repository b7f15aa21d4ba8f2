"""Process items on a Dask or Ray cluster. Each item is an uncached Prefect task.

mergegate pickles each item with its function, the mergegate home and a marker file. A worker that does not see the
marker has another home. The worker returns a pickle of the result or exception, with the progress events of the stages
that it ran.

Workers use the Prefect API of the run. A cluster that mergegate starts receives the API's address, home directory and
credentials in its environment, before any worker imports Prefect. On an existing cluster, Prefect's own context
provides them, and workers on other machines must be able to reach the API. If a worker dies, its item is retried. An
item whose workers die every time fails with InvalidInput.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkstemp
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import state_directory
from mergegate.merge_core.system import cores_of_process
from mergegate.tasks.runners.contract import Cluster, WorkerLost
from mergegate.tasks.runners.slots import WorkerSlot, gpu_of_worker, threads_of_worker, use_slot, visible_gpus
from mergegate.tasks.stage import DeferredProgress, StageEnd, home, progress_watcher, relay_progress

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

I = TypeVar("I")  # noqa: E741  # type of an item; R is the type of its result
R = TypeVar("R")

# The directory that workers import mergegate from: the checkout, or site-packages.
ROOT = Path(__file__).parents[3]
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0")
_TRIES = 2  # attempts per item if workers of mergegate's own cluster die


@dataclass(frozen=True)
class _Order:
    """An item and its function, pickled and sent to a worker.

    Args:
        home: Directory of mergegate's state. Workers use the same path.
        marker: File in ``home`` that exists while the runner is open. A worker that does not see it has another home.
        is_own_worker: Whether mergegate started the worker, on this machine.
    """

    function: Callable[[Any], Any]
    item: Any
    home: Path
    marker: Path
    is_own_worker: bool


@dataclass(frozen=True)
class _Answer:
    """The pickled result of an order."""

    result: Any
    failed: bool
    stages: tuple[StageEnd, ...]


class ClusterRunner:
    """Runner that processes items on a Dask or Ray cluster. It starts or joins the cluster when the first items arrive.

    Without ``workers``, the cluster decides how many items run in parallel. Without ``address``, mergegate starts a
    cluster on this machine.
    """

    is_parallel = True

    def __init__(self, kind: str, workers: int | None, address: str | None) -> None:
        self._kind, self._workers, self._address = kind, workers, address
        self._cluster: Cluster | None = None
        self._marker: Path | None = None

    def run_each(self, function: Callable[[I], R], items: Sequence[I]) -> Iterator[tuple[int, R | Exception]]:
        if not items:
            return
        from prefect import Task
        from prefect.cache_policies import NO_CACHE

        task = Task(fn=execute_order, name="item", cache_policy=NO_CACHE, persist_result=False)
        cluster, marker = self._open_cluster()
        outcomes: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        waiting = iter(enumerate(items))
        running: dict[int, Any] = {}

        def record(index: int, outcome: Any) -> None:
            outcomes.put((index, outcome))

        def submit_next() -> None:
            if (entry := next(waiting, None)) is not None:
                index, item = entry
                order = pickle.dumps(_Order(function, item, home(), marker, self._address is None))
                running[index] = cluster.submit(task, order, partial(record, index))

        try:
            # Submit only as many items as run at a time: a queued item would be blamed for the death of its worker.
            for _ in range(min(self._workers or cluster.workers, len(items))):
                submit_next()
            while running:
                index, outcome = outcomes.get()
                del running[index]
                submit_next()
                yield index, self._result(index, outcome)
        finally:
            for submitted in running.values():
                cluster.cancel(submitted)

    def close(self) -> None:
        """Stop the cluster if mergegate started it. An existing cluster keeps running."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)
            self._marker = None

    def _open_cluster(self) -> tuple[Cluster, Path]:
        """Start or join the cluster on first use. Return it with the marker file."""
        if self._cluster is not None and self._marker is not None:
            return self._cluster, self._marker
        from prefect.settings import get_current_settings

        # Environment variables that give access to the Prefect API of this run.
        settings = get_current_settings()
        api = {"PREFECT_HOME": str(settings.home)}
        if settings.api.url:
            api["PREFECT_API_URL"] = settings.api.url
        for variable, secret in (("AUTH_STRING", settings.api.auth_string), ("KEY", settings.api.key)):
            if secret is not None:
                api[f"PREFECT_API_{variable}"] = secret.get_secret_value()
        if self._address is not None:
            _require_reachable(api.get("PREFECT_API_URL", ""), self._address)
        descriptor, name = mkstemp(dir=state_directory(home()), prefix="runner-", suffix=".partial")
        os.close(descriptor)
        self._marker = Path(name)
        workers = self._workers or 1
        environment = {
            **api,
            **threads_of_worker(workers, cores_of_process()),
            "MERGEGATE_HOME": str(home()),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        kind: type[DaskCluster | RayCluster]
        if self._kind == "dask":
            from mergegate.tasks.runners.dask_cluster import DaskCluster

            kind = DaskCluster
        else:
            if "ray" not in sys.modules:
                # Ray reads these variables when it is imported, and passes them to its processes. They disable usage
                # statistics and allow a busy machine more time to start.
                variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "300"}
                if self._address is None:  # mergegate's own token, so that Ray writes none to the user's home
                    variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
                for variable, value in variables.items():
                    os.environ.setdefault(variable, value)
            from mergegate.tasks.runners.ray_cluster import RayCluster

            kind = RayCluster
        self._cluster = kind.connect(self._address) if self._address else kind.start(workers, _TRIES, environment)
        return self._cluster, self._marker

    def _result(self, index: int, outcome: Any) -> Any:
        location = f"runner {self._kind}: item {index}"
        if isinstance(outcome, WorkerLost):
            return InvalidInput(
                location,
                found=f"its worker died on every attempt ({outcome})",
                expected="a worker that survives until the item is complete",
                remedy="find out what kills the worker. Usually it runs out of memory, and fewer workers help",
            )
        answer = outcome
        if not isinstance(outcome, Exception):
            answer = outcome.result(raise_on_failure=False, _sync=True)
        if isinstance(answer, Exception):
            return answer
        if not isinstance(answer, bytes):
            return InvalidInput(location, found=f"the worker returned {outcome!r}", expected="an answer of mergegate")
        unpacked: _Answer = pickle.loads(answer)  # trusted: workers run mergegate's code and hold the API credentials
        relay_progress(unpacked.stages)
        return unpacked.result


def execute_order(order: bytes) -> State[bytes]:
    """Process the item of a pickled order in a worker, and return the pickled answer."""
    from prefect.states import Completed, Failed

    request: _Order = pickle.loads(order)
    progress = DeferredProgress()
    failed = True
    result: Any
    try:
        os.environ["MERGEGATE_HOME"] = str(request.home)
        if not request.marker.exists():
            raise InvalidInput(
                f"worker on {socket.gethostname()}",
                found=f"{request.home} is another directory on this machine",
                expected="one directory that all machines share under this path",
                remedy="mount it there, or set MERGEGATE_HOME to a directory that all machines share",
            )
        # In mergegate's own cluster, which runs on one machine, each Dask worker gets one of the GPUs. Ray assigns GPUs
        # itself. On an existing cluster, its operator assigns them.
        environment: dict[str, str] = {}
        if request.is_own_worker:
            with suppress(ImportError, ValueError):
                from distributed import get_worker

                environment = gpu_of_worker(int(get_worker().name), visible_gpus())
        slot = WorkerSlot(environment=tuple(environment.items()), scheduled=True)
        with progress_watcher(progress), use_slot(slot):
            result = request.function(request.item)
        failed = False
    except Exception as error:
        result = error
    try:
        answer = pickle.dumps(_Answer(result, failed, progress.stages))
        if failed:
            pickle.loads(answer)  # detects exceptions whose constructor does not accept their stored arguments
    except Exception:
        if not failed:
            raise
        substitute = RuntimeError(f"{type(result).__name__}: {result}")
        answer = pickle.dumps(_Answer(substitute, True, progress.stages))
    if failed:
        return Failed(message=f"{type(result).__name__}: {result}", data=answer)
    return Completed(data=answer)


def _require_reachable(api: str, address: str) -> None:
    """Raise InvalidInput if workers on other machines would look for the API on their own machine."""
    host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
    if address == "auto" or _LOOPBACK.fullmatch(host) or host == socket.gethostname():
        return
    if not api or _LOOPBACK.fullmatch(urlsplit(api).hostname or ""):
        raise InvalidInput(
            f"runner.address: {address}",
            found=f"workers on other machines cannot reach Prefect's API at {api or 'no address'}",
            expected="a Prefect server that the workers can reach",
            remedy="start a server that accepts remote connections (prefect server start --host …), and set "
            "PREFECT_API_URL",
        )

"""Process items on a Dask or Ray cluster. Each item is an uncached Prefect task.

mergegate pickles each item with its function, the mergegate home and a marker file. A worker that does not see the
marker has another home. The worker returns a pickle of the result or exception, with the progress events of the stages
that it ran.

Workers use the Prefect API of the run. A cluster that mergegate starts receives the API's address, home directory and
credentials in its environment, before any worker imports Prefect. On an existing cluster, Prefect's own context
provides them, and workers on other machines must be able to reach the API. If a worker dies, its item is retried. An
item whose workers die every time fails with InvalidInput.

Anyone who can reach the port of a cluster can execute code. Dask's own cluster therefore listens only on the loopback
interface and uses TLS with a temporary certificate. Ray listens on the machine's own address regardless of its
settings, so mergegate's own instance requires a token, which exists only in the environment of the processes that
mergegate starts.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import state_directory
from mergegate.merge_core.system import cores_of_process
from mergegate.tasks.base.runners.slots import (
    WorkerSlot,
    end_slot,
    gpu_of_worker,
    threads_of_worker,
    use_slot,
    visible_gpus,
)
from mergegate.tasks.base.stage import DeferredProgress, StageEnd, home, progress_watcher, relay_progress

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State

I = TypeVar("I")  # noqa: E741  # type of an item; R is the type of its result
R = TypeVar("R")

# The directory that workers import mergegate from: the checkout, or site-packages.
ROOT = Path(__file__).parents[3]
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0")
_TRIES = 2  # attempts per item if workers of mergegate's own cluster die
_PATIENCE_S = 60.0  # longest wait for a scheduler, or for the replacement of a dead worker
_OBJECT_STORE = 100 << 20  # bytes for Ray's object store: orders and answers are small
_DASK_LOGGERS = ("distributed", *(f"distributed.{name}" for name in ("worker", "nanny", "scheduler", "core")))
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Order:
    """An item and its function, pickled and sent to a worker."""

    function: Callable[[Any], Any]
    item: Any
    home: Path  # directory of mergegate's state; workers use the same path
    marker: Path  # file in ``home`` that exists while the runner is open
    is_own_worker: bool  # whether mergegate started the worker, on this machine


@dataclass(frozen=True)
class _Answer:
    """The pickled result of an order."""

    result: Any
    failed: bool
    stages: tuple[StageEnd, ...]


@dataclass(frozen=True)
class _Cluster:
    """A Dask or Ray cluster with one Prefect task runner for the whole run."""

    workers: int  # number of parallel items
    # Submits a task with its order. Returns its future, and a function that cancels it unless it is already running.
    submit: Callable[[Task[..., Any], bytes], tuple[Any, Callable[[], None]]]
    death: Callable[[BaseException], str]  # describes how the workers died; empty if an exception has another cause


class ClusterRunner:
    """Runner that processes items on a Dask or Ray cluster. It starts or joins the cluster when the first items arrive.

    Without ``workers``, the cluster decides how many items run in parallel. Without ``address``, mergegate starts a
    cluster on this machine.
    """

    is_parallel = True

    def __init__(self, kind: str, workers: int | None, address: str | None) -> None:
        self._kind, self._workers, self._address = kind, workers, address
        self._resources = ExitStack()
        self._opened: tuple[_Cluster, Path] | None = None  # with the marker file

    def run_each(self, function: Callable[[I], R], items: Sequence[I]) -> Iterator[tuple[int, R | Exception]]:
        if not items:
            return
        from prefect import Task
        from prefect.cache_policies import NO_CACHE

        task = Task(fn=execute_order, name="item", cache_policy=NO_CACHE, persist_result=False)
        self._opened = self._opened or self._open_cluster()
        cluster, marker = self._opened
        outcomes: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        waiting = iter(enumerate(items))
        cancel: dict[int, Callable[[], None]] = {}  # for each item in progress

        def record(index: int, future: Any) -> None:
            # Fetch the result immediately: Dask recomputes results that are lost with a worker.
            try:
                outcome = future.result()
            except BaseException as error:
                outcome = error if isinstance(error, Exception) else RuntimeError(repr(error))
                if description := cluster.death(error):
                    outcome = InvalidInput(
                        f"runner {self._kind}: item {index}",
                        found=f"its worker died on every attempt ({description})",
                        expected="a worker that survives until the item is complete",
                        remedy="find out what kills the worker. Usually it runs out of memory, and fewer workers help",
                    )
            outcomes.put((index, outcome))

        def submit_next() -> None:
            if (entry := next(waiting, None)) is not None:
                index, item = entry
                order = pickle.dumps(_Order(function, item, home(), marker, self._address is None))
                future, cancel[index] = cluster.submit(task, order)
                future.add_done_callback(partial(record, index))

        try:
            # Submit only as many items as run at a time: a queued item would be blamed for the death of its worker.
            for _ in range(min(self._workers or cluster.workers, len(items))):
                submit_next()
            while cancel:
                index, outcome = outcomes.get()
                del cancel[index]
                submit_next()
                yield index, self._result(index, outcome)
        finally:
            for cancel_item in cancel.values():
                with suppress(Exception):
                    cancel_item()

    def close(self) -> None:
        """Stop the cluster if mergegate started it. An existing cluster keeps running."""
        self._resources.close()
        self._opened = None

    def _open_cluster(self) -> tuple[_Cluster, Path]:
        """Start or join the cluster. Return it with the marker file."""
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
        descriptor, name = tempfile.mkstemp(dir=state_directory(home()), prefix="runner-", suffix=".partial")
        os.close(descriptor)
        self._resources.callback(Path(name).unlink, missing_ok=True)
        workers = self._workers or 1
        environment = {
            **api,
            **threads_of_worker(workers, cores_of_process()),
            "MERGEGATE_HOME": str(home()),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        open_kind = {"dask": _dask_cluster, "ray": _ray_cluster}[self._kind]
        return self._resources.enter_context(open_kind(self._address, workers, environment)), Path(name)

    def _result(self, index: int, outcome: Any) -> Any:
        answer = outcome
        if not isinstance(outcome, Exception):
            answer = outcome.result(raise_on_failure=False, _sync=True)
        if isinstance(answer, Exception):
            return answer
        if not isinstance(answer, bytes):
            location = f"runner {self._kind}: item {index}"
            return InvalidInput(location, found=f"the worker returned {outcome!r}", expected="an answer of mergegate")
        unpacked: _Answer = pickle.loads(answer)  # trusted: workers run mergegate's code and hold the API credentials
        relay_progress(unpacked.stages)
        return unpacked.result


@contextmanager
def _dask_cluster(address: str | None, workers: int, environment: Mapping[str, str]) -> Iterator[_Cluster]:
    """Open the Dask cluster whose scheduler is at ``address``, or one of worker processes on this machine.

    Each own worker has ``environment``, one thread, and no memory limit because its child processes use the memory.
    """
    import dask
    from distributed import KilledWorker, LocalCluster
    from prefect_dask.task_runners import DaskTaskRunner

    def silence() -> None:  # Dask's loggers write to the terminal regardless of the settings of a cluster.
        for name in _DASK_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    silence()
    with ExitStack() as resources:
        if address is None:
            settings = {
                "logging": dict.fromkeys(_DASK_LOGGERS, "critical"),
                "distributed.scheduler.allowed-failures": _TRIES - 1,
                "distributed.scheduler.worker-saturation": 1.0,  # no items queue at a worker
                "distributed.diagnostics.nvml": False,
            }
            resources.enter_context(dask.config.set(settings))
            directory = tempfile.TemporaryDirectory(prefix="mergegate-dask-", ignore_cleanup_errors=True)
            own = LocalCluster(
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
            runner = DaskTaskRunner(cluster=resources.enter_context(own))
        else:
            runner = DaskTaskRunner(address=address, client_kwargs={"timeout": _PATIENCE_S})
        silence()
        try:
            client = resources.enter_context(runner).client
            count = max(1, len(client.scheduler_info(n_workers=-1)["workers"]))
        except (OSError, TimeoutError, ValueError) as error:
            if address is None:
                raise
            raise InvalidInput(
                f"runner.address: {address}",
                found=f"no Dask scheduler answers there ({error})",
                expected="the address that the scheduler printed, such as tcp://host:8786",
            ) from None

        def submit(task: Task[..., Any], order: bytes) -> tuple[Any, Callable[[], None]]:
            if address is None:
                # If a worker has just died, wait for its replacement. Otherwise two items would queue at one worker.
                with suppress(TimeoutError):
                    client.wait_for_workers(count, timeout=_PATIENCE_S)
            future = runner.submit(task, {"order": order}).wrapped_future
            return future, future.cancel

        def death(error: BaseException) -> str:
            return f"{error.allowed_failures + 1} workers died" if isinstance(error, KilledWorker) else ""

        try:
            yield _Cluster(count, submit, death)
        finally:
            if address is not None:
                with suppress(Exception):  # the cluster keeps running, but its workers release their resources
                    client.run(end_slot, 0)
            try:
                resources.close()
            except Exception as error:
                # Dask complains about workers that are already gone. All work is done, so only log it.
                _log.info("the Dask cluster reported an error while it was closed: %r", error)


@contextmanager
def _ray_cluster(address: str | None, workers: int, environment: Mapping[str, str]) -> Iterator[_Cluster]:
    """Open the Ray instance at ``address``, or one on this machine whose processes have ``environment``.

    Prefect's runner would start and stop Ray with every flow, and hangs the second time. So mergegate starts Ray once,
    and the runner uses the running instance. Each item has its own process with one core, or with one GPU if the
    machine has any (Ray then sets CUDA_VISIBLE_DEVICES).
    """
    if "ray" not in sys.modules:
        # Ray reads these variables when it is imported, and passes them to its processes. They disable usage statistics
        # and allow a busy machine more time to start.
        variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "300"}
        if address is None:  # mergegate's own token, so that Ray writes none to the user's home
            variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        for variable, value in variables.items():
            os.environ.setdefault(variable, value)
    import ray
    from prefect_ray.context import remote_options
    from prefect_ray.task_runners import RayTaskRunner

    # Ray prints messages about workers to stdout, which another program may be parsing.
    with suppress(AttributeError):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    options: dict[str, Any] = {"address": address}
    with ExitStack() as resources:
        if address is None:
            # Socket paths are limited to 107 characters, and Ray's own part is long.
            temporary = tempfile.TemporaryDirectory(prefix="mg-ray-", dir="/tmp", ignore_cleanup_errors=True)
            options = {
                "num_cpus": workers,
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE,
                "runtime_env": {"env_vars": dict(environment)},
                "_temp_dir": resources.enter_context(temporary),
            }
        resources.callback(_shut_down_ray)
        try:
            ray.init(
                namespace="mergegate",
                configure_logging=True,
                logging_level=logging.CRITICAL,
                log_to_driver=False,
                **options,
            )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            if address is None:
                raise
            raise InvalidInput(
                f"runner.address: {address}",
                found=f"no Ray cluster answers there ({' '.join(str(error).split())[:200]})",
                expected="host:6379 on a machine of the cluster, ray://host:10001 from another machine, or auto",
            ) from None
        runner = resources.enter_context(RayTaskRunner())
        capacity = ray.cluster_resources()
        gpus = int(capacity.get("GPU", 0))
        item_options: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        if address is None:
            item_options["max_retries"] = _TRIES - 1

        def submit(task: Task[..., Any], order: bytes) -> tuple[Any, Callable[[], None]]:
            with remote_options(**item_options):
                reference = runner.submit(task, {"order": order}).wrapped_future
            return reference.future(), partial(ray.cancel, reference, force=True)

        errors = ray.exceptions
        deaths = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)
        yield _Cluster(
            workers=max(1, gpus or int(capacity.get("CPU", 1))),
            submit=submit,
            death=lambda error: type(error).__name__ if isinstance(error, deaths) else "",
        )


def _shut_down_ray() -> None:
    """Shut down Ray's connection.

    Ray ends the whole process if another thread drops the last reference to a result during the shutdown, which garbage
    collection can cause. So collect garbage first, and disable it until the shutdown is complete.
    """
    import ray

    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if was_enabled:
            gc.enable()


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

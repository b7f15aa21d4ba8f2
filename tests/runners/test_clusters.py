"""Dask and Ray clusters with two workers: same results, one API, and a dead worker costs its item one attempt."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import worker_functions

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.runners import Runner, RunnerSettings, open_runner
from mergegate.tasks.base.stage import DeferredProgress, progress_watcher

GONE_WITHIN_S = 60.0
# Ray has a separate environment. If the variable requires Ray, a missing environment fails the test.
IS_MISSING = find_spec("ray") is None and "MERGEGATE_REQUIRE_RAY" not in os.environ
KINDS = [
    pytest.param("dask", marks=pytest.mark.story),
    pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.skipif(IS_MISSING, reason="make test-ray")]),
]


@dataclass(frozen=True)
class Opened:
    """A runner that is open for all tests of a module."""

    kind: str
    runner: Runner
    before: dict[int, str]

    def each(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[tuple[int, Any]]:
        """Run each call in its own flow, as sweeps and releases do, because one runner serves several flows."""
        worker_functions.pending_calls[:] = [lambda: list(self.runner.run_each(function, items))]
        return worker_functions.run_in_flow()


@pytest.fixture(scope="module", params=KINDS)
def opened(
    request: pytest.FixtureRequest, prefect_api: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    kind = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEGATE_HOME", str(tmp_path_factory.mktemp(kind)))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("CUDA_VISIBLE_DEVICES", "5,6")  # Simulates a machine with these GPUs.
        before = descendants()
        with open_runner(RunnerSettings(kind=kind, workers=2)) as runner:
            yield Opened(kind, runner, before)
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := set(descendants()) - set(before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert {pid: what for pid, what in descendants().items() if pid in left} == {}
        assert not list(Path(os.environ["MERGEGATE_HOME"]).glob("runner-*"))


def test_two_items_run_at_a_time_and_results_arrive_in_order_of_completion(opened: Opened, tmp_path: Path) -> None:
    items = [(tmp_path, number, 4) for number in range(4)]
    results = opened.runner.run_each(worker_functions.finish_in_reverse, items)
    found = worker_functions.record_arrivals(results, tmp_path)
    assert dict(found) == {0: 0, 1: 1, 2: 4, 3: 9}
    assert found[0][0] == 1


def test_the_result_of_a_failed_item_is_its_exception(opened: Opened) -> None:
    found = dict(opened.each(worker_functions.refuse_odd, range(3)))
    assert (found[0], found[2]) == (0, 2)
    assert isinstance(found[1], Refused)
    assert found[1].where == "item 1"
    (_, error), *_ = opened.each(worker_functions.fail_oddly, [0])  # This exception cannot be pickled.
    assert isinstance(error, RuntimeError)
    assert str(error) == "OddError: left and right"


def test_workers_use_the_home_and_the_api_of_the_run(opened: Opened) -> None:
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    workers = [value for _, value in opened.each(worker_functions.worker_environment, range(4))]
    for worker in workers:
        assert worker["api"] == worker["PREFECT_API_URL"] == settings.api.url
        assert worker["prefect home"] == worker["PREFECT_HOME"] == str(settings.home)
        assert worker["PREFECT_API_AUTH_STRING"] == settings.api.auth_string.get_secret_value()
        assert worker["MERGEGATE_HOME"] == os.environ["MERGEGATE_HOME"]
        assert worker["HF_HUB_OFFLINE"] == "1"
        assert worker["OMP_NUM_THREADS"] == "1"
        assert int(worker["pid"]) != os.getpid()
        assert worker["executable"] == os.path.normpath(sys.executable)
    ours = {pid: what for pid, what in descendants().items() if pid not in opened.before}
    assert [what for what in ours.values() if "uvicorn" in what or "prefect.server" in what] == []


def test_each_worker_of_an_own_dask_cluster_sees_one_gpu(opened: Opened, tmp_path: Path) -> None:
    """Ray itself distributes the GPUs that it finds."""
    found = opened.each(worker_functions.gpu_with_both_running, [(tmp_path, number, 2) for number in range(2)])
    assert {gpu for _, gpu in found} == ({"5", "6"} if opened.kind == "dask" else {"none of its own"})


def test_stages_that_run_on_a_worker_are_reported_to_the_run(opened: Opened) -> None:
    watcher = DeferredProgress()
    with progress_watcher(watcher):
        opened.each(worker_functions.run_stage, range(2))
    stages = sorted((one.stage, one.subject, one.status) for one in watcher.stages)
    assert stages == [("evaluate", "0", "made"), ("evaluate", "1", "made")]


def test_a_runner_is_usable_after_an_iterator_was_closed(opened: Opened, tmp_path: Path) -> None:
    results = opened.runner.run_each(worker_functions.record_run, [(tmp_path, number) for number in range(20)])
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert dict(opened.each(worker_functions.square, range(3))) == {0: 0, 1: 1, 2: 4}
    assert len(list(tmp_path.iterdir())) < 20


# The last two tests of a cluster: on a busy machine, it may give up restarting a killed worker.
@pytest.mark.proof
def test_a_killed_worker_costs_one_attempt_of_one_item(opened: Opened, tmp_path: Path) -> None:
    found = opened.each(worker_functions.kill_first_worker, [(tmp_path, number, 2) for number in range(6)])
    assert dict(found) == {number: number for number in range(6)}
    assert count_tries(tmp_path) == {number: 2 if number == 2 else 1 for number in range(6)}
    assert len(set((tmp_path / "2").read_text().split())) == 2


def count_tries(directory: Path) -> dict[int, int]:
    return {int(file.name): len(file.read_text().split()) for file in directory.iterdir()}


@pytest.mark.proof
def test_an_item_that_kills_every_worker_fails(opened: Opened, tmp_path: Path) -> None:
    found = dict(opened.each(worker_functions.kill_every_worker, [(tmp_path, number, 2) for number in range(6)]))
    assert isinstance(found[2], InvalidInput)
    assert "its worker died on every attempt" in found[2].found
    assert {at: result for at, result in found.items() if at != 2} == {at: at for at in range(6) if at != 2}
    assert count_tries(tmp_path) == {number: 2 if number == 2 else 1 for number in range(6)}


@pytest.mark.proof
@pytest.mark.usefixtures("home", "prefect_api")
def test_an_existing_cluster_keeps_running_and_must_share_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import Client, LocalCluster

    from mergegate.tasks.base.runners import cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parent), str(cluster.ROOT))))
    own: Any = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "memory_limit": 0}
    with LocalCluster(n_workers=1, threads_per_worker=1, **own) as there:
        settings = RunnerSettings(kind="dask", address=there.scheduler_address)
        with open_runner(settings) as runner:
            (_, worker), *_ = runner.run_each(worker_functions.worker_environment, [0])
            assert worker["MERGEGATE_HOME"] == os.environ["MERGEGATE_HOME"]
            mark = next(Path(os.environ["MERGEGATE_HOME"]).glob("runner-*"))
            mark.unlink()  # Simulates a machine that has a different directory at this path.
            (_, error), *_ = runner.run_each(worker_functions.square, [0])
            assert isinstance(error, InvalidInput)
            assert "another directory" in error.found
        with Client(there.scheduler_address) as client:
            assert client.submit(os.getpid).result() == int(worker["pid"])


@pytest.mark.proof
@pytest.mark.usefixtures("home", "prefect_api")
def test_an_address_without_a_scheduler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mergegate.tasks.base.runners import cluster

    monkeypatch.setattr(cluster, "_PATIENCE_S", 0.5)
    settings = RunnerSettings(kind="dask", address="tcp://127.0.0.1:9")
    with open_runner(settings) as runner, pytest.raises(InvalidInput, match="no Dask scheduler"):
        list(runner.run_each(worker_functions.square, [0]))


def descendants() -> dict[int, str]:
    """Return the command lines of all running descendants of this process, by process id.

    Python's resource tracker is left out, because it stays once anything was spawned.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, above = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(above), []).append(int(entry.name))
    found: dict[int, str] = {}
    nodes = [os.getpid()]
    while nodes:
        for pid in children.get(nodes.pop(), []):
            try:
                found[pid] = (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            nodes.append(pid)
    return {pid: what for pid, what in found.items() if "multiprocessing.resource_tracker" not in what}

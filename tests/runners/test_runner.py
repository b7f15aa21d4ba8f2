"""All runners behave the same: each item runs once, results arrive when ready, and a failure is returned as a value."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import worker_functions
from pydantic import ValidationError

from mergegate.flows.profile import parse_profile
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.runners import RunnerSettings, local_runner, open_runner
from mergegate.tasks.base.runners import runner as runner_module
from mergegate.tasks.base.runners.cluster import _require_reachable
from mergegate.tasks.base.stage import DeferredProgress, StageEnd, progress_watcher, relay_progress
from mergegate.tasks.base.stage.progress import report_stage


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_each_item_runs_once_for_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    with open_runner(RunnerSettings(workers=workers)) as runner:
        found = dict(runner.run_each(worker_functions.record_run, [(tmp_path, number) for number in range(20)]))
    assert found == {number: number * number for number in range(20)}
    assert all(len(file.read_text().split()) == 1 for file in tmp_path.iterdir())


def test_one_worker_uses_the_current_thread_and_keeps_the_order() -> None:
    threads = set()

    def seen(item: int) -> int:
        threads.add(threading.current_thread())
        return item

    assert list(local_runner().run_each(seen, [3, 1, 2])) == [(0, 3), (1, 1), (2, 2)]
    assert threads == {threading.current_thread()}
    assert not local_runner().is_parallel


def test_results_arrive_in_order_of_completion(tmp_path: Path) -> None:
    with open_runner(RunnerSettings(workers=2)) as runner:
        items = [(tmp_path, number, 4) for number in range(4)]
        came = worker_functions.record_arrivals(runner.run_each(worker_functions.finish_in_reverse, items), tmp_path)
    assert came[0][0] == 1
    assert dict(came) == {0: 0, 1: 1, 2: 4, 3: 9}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_item_does_not_stop_the_others(workers: int) -> None:
    with open_runner(RunnerSettings(workers=workers)) as runner:
        found = dict(runner.run_each(worker_functions.refuse_odd, range(4)))
    assert (found[0], found[2]) == (0, 2)
    assert [type(found[at]) for at in (1, 3)] == [Refused, Refused]


def test_threads_inherit_the_context_of_the_caller() -> None:
    held: ContextVar[str] = ContextVar("held")
    held.set("here")
    with open_runner(RunnerSettings(workers=2)) as runner:
        assert {value for _, value in runner.run_each(lambda _: held.get("elsewhere"), range(4))} == {"here"}


def test_each_slot_runs_one_item_at_a_time(tmp_path: Path) -> None:
    with open_runner(RunnerSettings(workers=2)) as runner:
        items = [(tmp_path, number, 2) for number in range(2)]
        assert {value for _, value in runner.run_each(worker_functions.slot_with_both_running, items)} == {0, 1}


@pytest.mark.parametrize("workers", [1, 2])
def test_closing_the_iterator_starts_no_more_items(workers: int) -> None:
    begun: list[int] = []

    def begin(item: int) -> None:
        begun.append(item)
        time.sleep(0.005)

    with open_runner(RunnerSettings(workers=workers)) as runner:
        results = runner.run_each(begin, range(1000))
        next(results)
        results.close()  # type: ignore[attr-defined]
        many = len(begun)
    assert len(begun) == many < 1000


class Interrupt(BaseException):
    """An exception that ends a run."""


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_is_raised_in_the_calling_thread(workers: int) -> None:
    def end(_: int) -> None:
        raise Interrupt

    with open_runner(RunnerSettings(workers=workers)) as runner, pytest.raises(Interrupt):
        list(runner.run_each(end, range(3)))


has_dask = pytest.mark.skipif(find_spec("prefect_dask") is None, reason="without the extra 'dask'")


@pytest.mark.parametrize("settings", [{"workers": 3}, pytest.param({"kind": "dask"}, marks=has_dask)])
def test_no_items_give_no_results_and_start_no_cluster(settings: dict[str, Any]) -> None:
    with open_runner(RunnerSettings.model_validate(settings)) as runner:
        assert list(runner.run_each(worker_functions.square, [])) == []


@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_a_missing_package_is_reported_when_the_runner_is_opened(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "find_spec", lambda name: None)
    settings = RunnerSettings.model_validate({"kind": kind})
    with pytest.raises(InvalidInput, match="is not installed") as caught, open_runner(settings):
        pass
    assert f"mergegate[{kind}]" in caught.value.remedy


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"address": "tcp://a:1"}, "does not accept an address"),
        ({"kind": "spark"}, "'local', 'dask' or 'ray'"),
        ({"workers": 0}, "greater than or equal to 1"),
        ({"wokers": 2}, "Extra inputs"),
    ],
)
def test_meaningless_settings_are_refused(said: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RunnerSettings.model_validate(said)


def test_a_profile_selects_the_runner() -> None:
    profile = parse_profile({"name": "x", "recipe": "r.yaml", "runner": {"kind": "dask", "workers": 4}}, "p")
    assert profile.runner == RunnerSettings(kind="dask", workers=4)
    assert parse_profile({"name": "x", "recipe": "r.yaml"}, "p").runner == RunnerSettings()
    with pytest.raises(InvalidInput, match=r"runner\.wokers"):
        parse_profile({"name": "x", "recipe": "r.yaml", "runner": {"wokers": 4}}, "p")


@pytest.mark.parametrize(
    ("api", "address", "fine"),
    [
        ("http://127.0.0.1:4200/api", "tcp://127.0.0.1:8786", True),
        ("http://127.0.0.1:4200/api", "auto", True),
        ("http://127.0.0.1:4200/api", "tcp://10.0.0.1:8786", False),
        ("http://localhost:4200/api", "10.0.0.1:6379", False),
        ("", "ray://head:10001", False),
        ("http://prefect.example:4200/api", "ray://head:10001", True),
    ],
)
def test_workers_on_other_machines_must_reach_the_api(api: str, address: str, fine: bool) -> None:
    if fine:
        _require_reachable(api, address)
    else:
        with pytest.raises(InvalidInput, match=r"runner\.address") as caught:
            _require_reachable(api, address)
        assert "PREFECT_API_URL" in caught.value.remedy


def test_relayed_stages_reach_the_watcher() -> None:
    there, watcher = DeferredProgress(), DeferredProgress()
    with progress_watcher(there), report_stage("evaluate", "merge") as report:
        report.status, report.summary = "made", "copy 100.0"
    with progress_watcher(watcher):
        relay_progress(there.stages)
    (told,) = watcher.stages
    assert told == there.stages[0] == StageEnd("evaluate", "merge", "made", told.seconds, "copy 100.0")

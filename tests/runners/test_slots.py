"""Worker slots: each gets a share of the machine, and state in one slot is not visible in the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import worker_functions

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.runners.slots import (
    Cancelled,
    WorkerSlot,
    current_slot,
    end_slot,
    gpu_of_worker,
    slots_for,
    threads_of_worker,
    use_slot,
    visible_gpus,
)
from mergegate.tasks.models.checkpoints import call_model_process, end_model_process
from mergegate.tasks.models.checkpoints.model import Model


def test_a_single_worker_uses_the_default_slot() -> None:
    assert slots_for(1, 64, ("0", "1")) == (current_slot(),) == (WorkerSlot(),)
    assert current_slot().environment == ()


@pytest.mark.parametrize(
    ("workers", "cores", "said", "threads"),
    [
        (2, 64, {}, "32"),
        (3, 64, {}, "21"),  # Never more threads than cores.
        (4, 2, {}, "1"),  # At least one thread.
        (2, 64, {"OMP_NUM_THREADS": "8"}, "8"),  # The user set a lower limit.
        (2, 64, {"OMP_NUM_THREADS": "64"}, "32"),  # The user's limit would give each worker all cores.
        (2, 64, {"OMP_NUM_THREADS": "many"}, "32"),
        (2, 64, {"OMP_NUM_THREADS": "0"}, "32"),
    ],
)
def test_workers_share_the_cores(workers: int, cores: int, said: dict[str, str], threads: str) -> None:
    assert threads_of_worker(workers, cores, said)["OMP_NUM_THREADS"] == threads


def test_each_worker_sees_one_gpu_and_more_workers_take_turns() -> None:
    seen = [dict(slot.environment)["CUDA_VISIBLE_DEVICES"] for slot in slots_for(3, 8, ("2", "GPU-5ad3"))]
    assert seen == ["2", "GPU-5ad3", "2"]
    assert gpu_of_worker(0, ()) == {}
    assert all("CUDA_VISIBLE_DEVICES" not in dict(slot.environment) for slot in slots_for(2, 8, ()))


def test_visible_gpus_follow_the_environment_and_then_the_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia9", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path, {}) == ("0", "9", "10")
    assert visible_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "3, GPU-1"}) == ("3", "GPU-1")
    # Hidden from this process, and therefore from its children.
    assert visible_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert visible_gpus(tmp_path / "none", {}) == ()


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run model processes that can import the tests' module ``work``, and end them after the test."""
    places = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    end_model_process()
    yield
    end_model_process()


def asked_at(
    slot: WorkerSlot, function: Any = worker_functions.process_identity, *arguments: object, models: Any = ()
) -> Any:
    with use_slot(slot):
        return call_model_process(function, arguments, location=f"place {slot.number}", models=models)


def in_children(test: Any) -> Any:
    return pytest.mark.story(pytest.mark.usefixtures("children", "home")(test))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@in_children
def test_every_slot_keeps_its_own_process_and_share_and_works_in_parallel(tmp_path: Path) -> None:
    slots = slots_for(2, 8, ("0", "1"))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(asked_at, slots))
        again = list(threads.map(asked_at, slots))
        # Each call waits for the other, so they would never end if they ran one after the other.
        wait = worker_functions.wait_for_peer
        futures = [threads.submit(asked_at, slot, wait, tmp_path, slot.number) for slot in slots]
        assert [future.result() for future in futures] == ["met", "met"]
    assert found == again
    (first, one), (second, other) = found
    assert len({os.getpid(), first, second}) == 3
    share = min(4, int(os.environ.get("OMP_NUM_THREADS", "4")))
    assert [one["OMP_NUM_THREADS"], other["OMP_NUM_THREADS"]] == [str(share)] * 2
    assert [one["CUDA_VISIBLE_DEVICES"], other["CUDA_VISIBLE_DEVICES"]] == ["0", "1"]
    end_slot(1)
    assert (alive(first), alive(second)) == (True, False)
    end_model_process()
    assert not alive(first)


@pytest.mark.proof
@in_children
def test_a_process_that_is_killed_next_to_others_is_tried_again_without_them(tmp_path: Path) -> None:
    """The system kills a process if several together need too much memory."""
    slots = slots_for(2, 2, ())
    other = asked_at(slots[1])
    model = Model(name="a", digest="a", directory=tmp_path)
    assert asked_at(slots[0], worker_functions.die_on_first_call, tmp_path, models=(model,)) == "second time"
    assert not alive(other[0])
    # A model that is killed while it runs alone is not retried.
    with pytest.raises(InvalidInput, match="killed by signal 9"):
        asked_at(slots[0], worker_functions.die, models=(model,))


@in_children
def test_a_cancelled_slot_ends_its_process(tmp_path: Path) -> None:
    gone = threading.Event()
    slot = WorkerSlot(1, cancelled=gone)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(asked_at, slot, worker_functions.wait_forever, tmp_path)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert not waiting.done()
        gone.set()
        with pytest.raises(Cancelled):
            waiting.result()
    assert not alive(int((tmp_path / "pid").read_text()))
    with pytest.raises(Cancelled):  # No process is started for a cancelled slot.
        asked_at(slot)

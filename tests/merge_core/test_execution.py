"""Threads, devices and compiled kernels of a merge are chosen by name and order, and compiled only when needed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from family import LINEAR, MERGE_FUSED, load, merge_text, plan_recipe, recipe_of
from patience import HANG_S

from mergegate.merge_core import merge_weights
from mergegate.merge_core.engine.devices import choose_devices
from mergegate.merge_core.engine.execution import Workers
from mergegate.merge_core.errors import InvalidInput


def ignore(failure: BaseException) -> None:
    raise AssertionError(failure)


def test_the_oldest_tensor_is_processed_first_and_its_blocks_in_order() -> None:
    gate, done, seen = threading.Event(), threading.Event(), []
    workers = Workers(1, ignore)
    workers.submit(0, gate.wait)  # The following work is queued when the thread becomes free.
    for order, block in [(2, "a"), (1, "a"), (1, "b"), (0, "a")]:
        workers.submit(order, lambda order=order, block=block: seen.append((order, block)))  # type: ignore[misc]
    workers.submit(9, done.set)
    gate.set()
    assert done.wait(HANG_S)
    workers.stop()
    assert seen == [(0, "a"), (1, "a"), (1, "b"), (2, "a")]


def test_no_work_starts_after_a_failure_and_the_failure_is_reported() -> None:
    gate, failed, told, seen = threading.Event(), threading.Event(), [], []

    def fail() -> None:
        gate.wait()
        raise ValueError("broken")

    def tell(failure: BaseException) -> None:
        told.append(str(failure))
        failed.set()

    workers = Workers(1, tell)
    workers.submit(0, fail)
    workers.submit(1, lambda: seen.append("begun"))
    gate.set()
    assert failed.wait(HANG_S)
    workers.stop()
    assert told == ["broken"]
    assert seen == []


def test_stopping_waits_for_running_work_and_drops_queued_work() -> None:
    began, gate, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        began.set()
        gate.wait()
        seen.append("ended")

    workers = Workers(1, ignore)
    workers.submit(0, work)
    workers.submit(1, lambda: seen.append("begun"))
    assert began.wait(HANG_S)
    stopper = threading.Thread(target=workers.stop)
    stopper.start()
    with workers._condition:
        assert workers._condition.wait_for(lambda: workers._stopped, HANG_S)
    gate.set()
    stopper.join(HANG_S)
    assert seen == ["ended"]


INSPECT = (
    "import numpy as np; from mergegate.merge_core.methods import kernels;"
    "words = np.array([0, 0x7F80, 1], np.uint64);"
    "assert kernels.inspect(words, np.uint64(0x7F80), np.uint64(0x80)) == (0x8080, 0x7F81)"
)


def run(code: str = INSPECT, place: Path | None = None, **environment: str) -> None:
    """Use kernels in a fresh process."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    subprocess.run([sys.executable, "-c", code], cwd=place, env={**inherited, **environment}, check=True)


def kept(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.rglob("*.nbc")}


@pytest.mark.story
def test_a_kernel_is_compiled_once_and_cached_for_the_user_or_works_without_a_cache(tmp_path: Path) -> None:
    run(XDG_CACHE_HOME=str(tmp_path))
    first = kept(tmp_path / "mergegate")
    assert first
    run(XDG_CACHE_HOME=str(tmp_path))
    assert kept(tmp_path / "mergegate") == first
    run(XDG_CACHE_HOME="/dev/null/nowhere")


@pytest.mark.proof
def test_rules_that_keep_everything_compile_no_code_for_masks(wide: Path) -> None:
    """Compiling the unneeded drop rules would take most of the seconds before a first merge."""
    (wide / "recipe.yaml").write_text(recipe_of("task_arithmetic"))
    run(MERGE_FUSED, wide, NUMBA_CACHE_DIR=str(wide / "cache"))
    compiled = {name.split("-")[0] for name in kept(wide / "cache")}
    assert "task_vectors.task_vectors" in compiled
    assert {name for name in compiled if name.startswith(("ranks.", "sparsify."))} == {
        "sparsify.sparsify",
        "sparsify.apply_mask",  # a mask that an earlier pass stored; it has no rule
    }


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report two GPUs."""
    monkeypatch.setattr("mergegate.merge_core.engine.devices.has_cuda_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("name", "chosen"), [("auto", "cuda:0, cuda:1"), ("cuda", "cuda:0, cuda:1"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_auto_and_cuda_mean_all_gpus_and_a_number_means_one(name: str, chosen: str) -> None:
    devices = choose_devices(name)
    assert str(devices) == chosen
    assert devices.note == ""


@pytest.mark.usefixtures("no_gpu")
def test_auto_without_a_gpu_uses_the_cpu_and_reports_it(family: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mergegate.merge_core"):
        record = merge_text(LINEAR, family)
    assert record.device == "cpu"
    assert record.note.startswith("device auto: ")
    assert record.note.endswith("so the CPU computes")
    assert record.note in caplog.text


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "does not exist") for name in ("cuda", "cuda:0", "cuda:7")),
        *((name, "expected: auto, cpu") for name in ("gpu", "mps", "tpu")),
    ],
)
def test_a_missing_gpu_and_other_devices_are_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        choose_devices(name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["linear", "dare_linear", "ties"])
def test_a_gpu_agrees_with_the_cpu_to_one_unit_in_the_last_place(family: Path, method: str) -> None:
    base = "" if method == "linear" else "base_model: base\n"
    text = f"merge_method: {method}\n{base}models: [{{model: a}}, {{model: b}}]\nparameters: {{weight: 0.5}}\n"
    plan = plan_recipe(text, family)
    for device in ("cpu", "cuda"):
        merge_weights(plan, family / device, device=device)
    expected = load(family / "cpu")
    for name, merged in load(family / "cuda").items():
        np.testing.assert_allclose(merged, expected[name], rtol=2**-23, err_msg=name)

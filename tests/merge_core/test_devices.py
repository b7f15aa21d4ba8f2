"""A device name resolves to a device, with a clear message if it is not the requested one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from family import merge_text

from mergegate.merge_core.engine.devices import choose_devices
from mergegate.merge_core.errors import InvalidInput

LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"


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
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_missing_gpu_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="does not exist"):
        choose_devices(name)


@pytest.mark.parametrize("name", ["gpu", "mps", "tpu"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="expected: auto, cpu"):
        choose_devices(name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["linear", "dare_linear", "ties"])
def test_a_gpu_agrees_with_the_cpu_to_one_unit_in_the_last_place(family: Path, method: str) -> None:
    from family import load

    from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge

    base = "" if method == "linear" else "base_model: base\nmodels: [{model: a}, {model: b}]\n"
    text = f"merge_method: {method}\n{base or 'models: [{model: a}, {model: b}]'}\nparameters: {{weight: 0.5}}\n"
    recipe = load_recipe(text)
    plan = plan_merge(recipe, {str(ref): open_checkpoint(family / ref.path) for ref in recipe.references()})
    for device in ("cpu", "cuda"):
        merge_weights(plan, family / device, device=device)
    expected = load(family / "cpu")
    for name, merged in load(family / "cuda").items():
        np.testing.assert_allclose(merged, expected[name], rtol=2**-23, err_msg=name)

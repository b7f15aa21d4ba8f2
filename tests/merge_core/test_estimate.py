"""The resource estimate for a merge matches its actual use. Measuring a machine takes bounded time, without files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import LINEAR, plan_recipe
from safetensors.torch import save_file
from sparse_models import LLAMA_70B, header_bytes, llama, save_sparse, weights_of

from mergegate.merge_core import EngineSettings, MergePlan, merge_methods, merge_weights
from mergegate.merge_core.engine.forecast import forecast, probe
from mergegate.merge_core.engine.forecast.probe import (
    load_rates,
    machine_key,
    measure_bus,
    measure_machine,
    reference_pass,
    save_rates,
)
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.contract import REQUIRED, Block, Fold, Map, TensorTask
from mergegate.merge_core.methods.masks import mask_key

MODEL = {"layers": 2, "hidden": 64, "wide": 256, "keys": 16, "tokens": 500}
TIES = (
    "merge_method: ties\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5, density: 0.5}\n"
)
RATES = forecast.Rates(read=100.0, write=50.0, copy=1000.0, hash=40.0, units=10.0, same_disk=True, measured_at=0.0)
NEEDS = forecast.Needs(
    device="cpu", tensors=1, parameters=100, input_files=2, shards=1, bytes_read=400, bytes_read_again=800,
    bytes_from_disk_again=800, bytes_passed=1200, bytes_written=200, passes=3, read_again=1, units=60.0, block=0,
    gpu_block=0, memory=0, gpu_memory=0, disk=200,
)  # fmt: skip


def planned(text: str, root: Path, *names: str, **sizes: Any) -> MergePlan:
    for name in names:
        save_sparse(root / name, llama(**{**MODEL, **sizes}), shards=2)
    return plan_recipe(text, root)


def needs(plan: MergePlan, *, cores: int = 2, device: str = "cpu", **settings: Any) -> forecast.Needs:
    return forecast.estimate_needs(plan, EngineSettings(**settings), cores=cores, device=device)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in sorted(merge_methods())), ("ties", {"density": 1.0}), ("ties", {"rescale": True}),
    ("ties", {"rescale": "density"}), ("breadcrumbs", {"rescale": True}), ("dare_ties", {"rescale": False}),
    ("dare_linear", {"rescale": "density"}), ("della", {"density": 1.0}), ("nuslerp", {"nuslerp_flatten": False}),
    ("nuslerp", {"nuslerp_flatten": False, "nuslerp_row_wise": True}), ("model_stock", {"filter_wise": True}),
    ("sce", {"select_topk": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "chosen"), VARIANTS, ids=lambda value: str(value))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_forecast_has_the_actual_number_of_passes(name: str, chosen: dict[str, Any], dtype: Any) -> None:
    method = merge_methods()[name]
    count = min(3, method.models[1] or 3) + (1 if method.base == "required" else 0)
    if name in ("nearswap", "arcee_fusion"):
        count = 2
    has_base = method.base == "required"
    typical = {"density": 0.5, "select_topk": 0.5, "weight": 0.5, "t": 0.5, "rate": 0.01, **chosen}
    values = {
        parameter.name: typical.get(parameter.name, parameter.default)
        for parameter in method.parameters
        if parameter.default is not REQUIRED or parameter.name in typical
    }
    shared = {p.name: values[p.name] for p in method.parameters if p.scope == "shared"}
    own = {p.name: values[p.name] for p in method.parameters if p.scope != "shared"}
    per_input = tuple({} if has_base and index == 0 else own for index in range(count))
    shape = (32, 64)
    task = TensorTask("w", shape, dtype, has_base, shared, per_input, tuple(mask_key(0, "w", i) for i in range(count)))
    expected = forecast.work_of(method, task)
    assert expected.is_measured
    assert expected.folds == folds_made(method.steps(task), count, dtype, method.grain(shape, shared))


def folds_made(steps: Any, count: int, dtype: str, grain: int) -> int:
    """Run a method's passes over coarse numbers with many equal magnitudes, and count its folds."""
    generator = np.random.default_rng(0)
    numbers = torch.from_numpy(generator.integers(-4, 5, (count, 2048)) / 8).to(getattr(torch, dtype))
    numbers[:, ::5] += torch.arange(count)[:, None].to(numbers)
    block, folds, result = Block(numbers, 0, grain), 0, None
    while True:
        try:
            step: Fold | Map = steps.send(result)
        except StopIteration:
            return folds
        assert isinstance(step, Fold)
        result, folds = step.combine([step.reduce_block(block).numpy()]), folds + 1


def test_a_method_without_declared_costs_has_assumed_ones() -> None:
    foreign = replace(merge_methods()["linear"], name="foreign", costs=None)
    task = TensorTask("w", (4, 4), "float32", False, {"normalize": True}, ({"weight": 1.0},) * 2, ((0, 0),) * 2)
    assert forecast.work_of(foreign, task) == forecast.Work(1, 8.0, is_measured=False)


def test_a_70_b_merge_reads_all_weights_and_writes_one_model(tmp_path: Path) -> None:
    plan = planned(TIES, tmp_path, "base", "a", "b", **LLAMA_70B)
    size = sum(file.stat().st_size - header_bytes(file) for file in weights_of(tmp_path / "base"))
    found = needs(plan)
    assert (found.tensors, found.parameters) == (723, size // 2)
    assert found.bytes_read == 3 * size
    assert found.bytes_written == sum(file.stat().st_size for file in weights_of(tmp_path / "base"))
    assert found.memory < 1 << 30


def test_the_forecast_matches_an_actual_merge(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "a", "b")):
        save_sparse(tmp_path / name, llama(**MODEL))
        generator = torch.Generator().manual_seed(seed)
        tensors = {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in llama(**MODEL).items()}
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    plan = plan_recipe(TIES, tmp_path)
    record = merge_weights(plan, tmp_path / "out", device="cpu")
    found = needs(plan)
    for name in ("tensors", "bytes_read", "bytes_written"):
        assert getattr(found, name) == getattr(record, name)
    written = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert written * 0.95 <= found.disk <= written * 1.05


def test_further_passes_come_from_the_page_cache_unless_the_tensor_is_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(TIES, tmp_path, "base", "a", "b")
    found = needs(plan)
    assert (found.passes, found.bytes_read_again) == (4, 3 * plan.bytes_read)
    assert (found.read_again, found.bytes_from_disk_again) == (0, 0)
    embeddings = 3 * 2 * 500 * 64
    monkeypatch.setattr("mergegate.merge_core.engine.forecast.forecast._CACHED_BYTES", embeddings - 1)
    some = needs(plan)
    assert (some.read_again, some.bytes_from_disk_again) == (2, 2 * 3 * embeddings)


def test_a_single_pass_reads_nothing_again_and_a_gpu_needs_memory_of_its_own(tmp_path: Path) -> None:
    plan = planned(LINEAR, tmp_path, "a", "b")
    found = needs(plan)
    assert (found.passes, found.bytes_read_again, found.read_again, found.gpu_memory) == (1, 0, 0, 0)
    assert 0 < needs(plan, device="cuda:1").gpu_memory < 1 << 30


def test_memory_depends_on_blocks_and_threads_not_on_the_model(tmp_path: Path) -> None:
    small = planned(LINEAR, tmp_path / "small", "a", "b", hidden=2048, wide=8192)
    large = planned(LINEAR, tmp_path / "large", "a", "b", hidden=2048, wide=8192, layers=40)
    assert needs(large).memory == needs(small).memory
    # Two more threads with one block each: two bfloat16 inputs, a bfloat16 output, and float32 intermediates.
    more = needs(small, cores=4).memory - needs(small).memory
    assert more == 2 * (1 << 20) * (2 + 2 + 2 + 4)


def test_steps_of_a_recipe_are_counted_but_their_results_are_no_input_files(tmp_path: Path) -> None:
    steps = f"name: first\n{LINEAR}---\n{LINEAR.replace('model: a', 'model: first')}"
    plan, single = planned(steps, tmp_path / "two", "a", "b"), planned(LINEAR, tmp_path / "one", "a", "b")
    two, one = needs(plan), needs(single)
    assert two.bytes_written == 2 * one.bytes_written
    assert two.bytes_read == 2 * one.bytes_read
    assert two.parameters == one.parameters
    assert len(forecast.input_files(plan)) == two.input_files == 4


def test_time_is_between_full_and_no_overlap() -> None:
    found = forecast.duration(NEEDS, RATES, cores=2)
    assert (found.reading, found.reading_again, found.writing, found.hashing) == (4.0, 8.0, 4.0, 5.0)
    assert found.computing == pytest.approx(60 / 10 + (2 * 400 + 800 + 2 * 200) / 1000)
    assert found.at_least == pytest.approx(found.computing + found.hashing / 2)
    assert found.at_most == pytest.approx(4 + 8 + 4 + found.computing + found.hashing / 2)
    assert found.at_least < found.at_most


def test_two_disks_work_at_the_same_time_hashing_uses_one_core_and_passes_cross_the_bus() -> None:
    busy = replace(NEEDS, units=0.0, bytes_written=100, bytes_read=1000)
    one, two = (
        forecast.duration(busy, RATES, cores=2),
        forecast.duration(busy, replace(RATES, same_disk=False), cores=2),
    )
    assert (one.at_least, two.at_least) == (12.0, 10.0)
    found = forecast.duration(
        replace(NEEDS, units=0.0, bytes_read=0, bytes_written=400), replace(RATES, write=1e9), cores=64
    )
    assert found.at_least == found.hashing == 10.0
    found = forecast.duration(replace(NEEDS, device="cuda"), replace(RATES, bus=100.0), cores=2)
    assert found.computing == pytest.approx((1200 + 200) / 100 + 2000 / 1000)


MEASURED = forecast.Rates(read=1.0, write=2.0, copy=3.0, hash=4.0, units=5.0, same_disk=False, measured_at=0.0)


class FakeDisk:
    """A disk of a given speed, with a clock that only the disk advances."""

    def __init__(self, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rate, self.now, self.sizes = rate, 0.0, list[int]()
        monkeypatch.setattr("mergegate.merge_core.engine.forecast.probe.time.perf_counter", lambda: self.now)

    def step(self, size: int) -> None:
        self.sizes.append(size)
        self.now += size / self.rate


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(256)) * 40_000)
    return file


@pytest.mark.story
@pytest.mark.parametrize("with_inputs", [True, False])
def test_a_probe_gives_rates_and_leaves_nothing(tmp_path: Path, weights: Path, with_inputs: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    before = weights.stat()
    rates = measure_machine([weights] if with_inputs else [], out, cores=2)
    assert min(rates.read, rates.write, rates.copy, rates.hash, rates.units, rates.products) > 0
    assert rates.same_disk
    assert list(out.iterdir()) == []
    assert (weights.stat().st_mtime_ns, weights.stat().st_size) == (before.st_mtime_ns, before.st_size)


@pytest.mark.parametrize("rate", [1e6, 1e8, 1e11])
def test_a_fast_disk_transfers_more_in_the_same_time(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(rate, monkeypatch)
    measured, total = probe._best_rate(disk.step, (1 << 18, 1 << 26), seconds=0.1)
    assert measured == pytest.approx(rate)
    assert total == sum(disk.sizes)
    assert disk.now <= max(0.1, (1 << 18) / rate)  # The smallest step is the minimum.
    if rate == 1e11:
        assert disk.sizes[-1] == 1 << 26


def test_an_interruption_does_not_change_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(1e9, monkeypatch)

    def step(size: int) -> None:
        disk.step(size)
        disk.now += 0.05 if len(disk.sizes) == 3 else 0.0

    assert probe._best_rate(step, (1 << 18, 1 << 22), seconds=1.0)[0] == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (lambda place: measure_machine([], place / "missing", cores=1), "cannot be written"),
        (lambda place: probe._input_rate([place]), "cannot be read"),
        (lambda _: measure_bus("cuda:99"), "cuda:99, which does not exist"),
    ],
    ids=["output", "input", "GPU"],
)
def test_what_cannot_be_measured_is_named(tmp_path: Path, measure: Callable[[Path], object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        measure(tmp_path)


def test_an_unwritable_rates_file_is_not_an_error(tmp_path: Path, weights: Path) -> None:
    save_rates(weights / "rates.json", "here", MEASURED)
    assert load_rates(weights / "rates.json", "here", max_age=3600) is None


def test_more_elements_take_longer() -> None:
    few, many = (min(reference_pass(elements) for _ in range(3)) for elements in (1 << 18, 1 << 22))
    assert many > 4 * few


def test_rates_are_stored_per_machine_and_expire(tmp_path: Path) -> None:
    memory = tmp_path / "state" / "rates.json"
    new, old = (replace(MEASURED, measured_at=time.time() - age) for age in (0, 7200))
    save_rates(memory, "here", new)
    save_rates(memory, "there", old)
    assert load_rates(memory, "here", max_age=3600) == new
    assert load_rates(memory, "there", max_age=3600) is None
    assert load_rates(memory, "there", max_age=10_000) == old
    assert load_rates(memory, "elsewhere", max_age=3600) is None
    assert [path.name for path in memory.parent.iterdir()] == ["rates.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"here": {"read": 1}}', '{"here": 7}'])
def test_a_damaged_rates_file_is_ignored(tmp_path: Path, content: str) -> None:
    memory = tmp_path / "rates.json"
    memory.write_text(content)
    assert load_rates(memory, "here", max_age=3600) is None
    new = replace(MEASURED, measured_at=time.time())
    save_rates(memory, "here", new)
    assert load_rates(memory, "here", max_age=3600) == new


def test_the_machine_key_has_machine_disks_and_device(tmp_path: Path, weights: Path) -> None:
    here = machine_key([weights], tmp_path, cores=2, device="cpu")
    assert here == machine_key([weights, weights], tmp_path, cores=2, device="cpu")
    assert here != machine_key([weights], tmp_path, cores=2, device="cuda")

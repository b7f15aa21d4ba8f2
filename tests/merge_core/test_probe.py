"""Measuring a machine takes bounded time and leaves no files."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from mergegate.merge_core.engine.forecast import probe
from mergegate.merge_core.engine.forecast.forecast import Rates
from mergegate.merge_core.engine.forecast.probe import (
    load_rates,
    machine_key,
    measure_bus,
    measure_machine,
    reference_pass,
    save_rates,
)
from mergegate.merge_core.errors import InvalidInput

RATES = Rates(read=1.0, write=2.0, copy=3.0, hash=4.0, units=5.0, same_disk=False, measured_at=0.0)


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


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be written"):
        measure_machine([], tmp_path / "missing", cores=1)


def test_an_input_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        probe._input_rate([tmp_path])


def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(InvalidInput, match="cuda:99, which does not exist"):
        measure_bus("cuda:99")


def test_an_unwritable_rates_file_is_not_an_error(tmp_path: Path, weights: Path) -> None:
    save_rates(weights / "rates.json", "here", RATES)
    assert load_rates(weights / "rates.json", "here", max_age=3600) is None


def test_more_elements_take_longer() -> None:
    few, many = (min(reference_pass(elements) for _ in range(3)) for elements in (1 << 18, 1 << 22))
    assert many > 4 * few


def test_rates_are_stored_per_machine_and_expire(tmp_path: Path) -> None:
    memory = tmp_path / "state" / "rates.json"
    new, old = (replace(RATES, measured_at=time.time() - age) for age in (0, 7200))
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
    new = replace(RATES, measured_at=time.time())
    save_rates(memory, "here", new)
    assert load_rates(memory, "here", max_age=3600) == new


def test_the_machine_key_has_machine_disks_and_device(tmp_path: Path, weights: Path) -> None:
    here = machine_key([weights], tmp_path, cores=2, device="cpu")
    assert here == machine_key([weights, weights], tmp_path, cores=2, device="cpu")
    assert here != machine_key([weights], tmp_path, cores=2, device="cuda")

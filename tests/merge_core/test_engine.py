"""The engine's bytes depend only on recipe, inputs and seed, and an interrupted merge never looks finished."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import LINEAR, MERGE_FUSED, load, merge_text, plan_recipe, random_tensors, recipe_of, save_checkpoint
from samples import sampled

from mergegate.merge_core import EngineSettings, merge_methods, merge_weights, open_checkpoint
from mergegate.merge_core.engine import blocks, execution, tensor_run, writer
from mergegate.merge_core.errors import DiskUnavailable, InvalidInput
from mergegate.merge_core.methods import Fold, Map, Steps
from mergegate.merge_core.methods.masks import MaskCache

DARE = (
    "merge_method: dare_ties\nbase_model: base\nmodels: [{model: a}, {model: b}, {model: c}]\n"
    "parameters: {weight: 0.5, density: 0.4}\ndtype: bfloat16\n"
)
TIES = DARE.replace("dare_ties", "ties")


# ``test_merge_tensors.py`` and ``test_methods.py`` merge with every method, too.
EVERY = sampled(sorted(merge_methods()), ("dare_ties", "slerp", "arcee_fusion", "breadcrumbs"))


@pytest.mark.parametrize("method", EVERY)
def test_bytes_do_not_depend_on_kernels_blocks_or_threads(wide: Path, method: str) -> None:
    ways = itertools.product(("torch", "fused"), [{"threads": 1}, {"block_elements": 32768, "threads": 7}])
    text = recipe_of(method)
    files = [merge_text(text, wide, f"out{n}", kernels=kind, **way).files for n, (kind, way) in enumerate(ways)]
    assert files == [files[0]] * 4


@pytest.mark.parametrize("method", EVERY)
def test_retained_blocks_are_not_read_again_and_change_no_byte(
    wide: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retaining no, some or all blocks gives the same bytes, and with all retained, each input is read once."""
    read, read_into, seen = list[int](), blocks.read_into, []
    monkeypatch.setattr(blocks, "read_into", lambda fd, into, *at: (read.append(len(into)), read_into(fd, into, *at)))
    for kept in (0, 1 << 20, 1 << 30):
        monkeypatch.setattr(execution, "RETAINED_BYTES", kept)
        read.clear()
        record = merge_text(recipe_of(method), wide, f"out{kept}", block_elements=32768)
        seen.append((record.files, sum(read)))
    assert [files for files, _ in seen] == [record.files] * 3
    (_, anew), (_, some), (_, once) = seen
    assert anew >= some >= once == record.bytes_read
    assert anew > some > once or method not in ("slerp", "ties", "arcee_fusion")


def test_masks_without_cache_memory_are_computed_again_and_change_no_byte(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = merge_text(DARE, wide, "noted", kernels="fused")
    monkeypatch.setattr(MaskCache, "_free_bytes", 0)
    assert merge_text(DARE, wide, "again", kernels="fused").files == noted.files


@pytest.mark.story
@pytest.mark.parametrize("text", [LINEAR, TIES, DARE])
def test_fused_kernels_need_neither_torch_nor_scipy(wide: Path, text: str) -> None:
    """Importing torch takes longer than merging a small model, and its threads would compete with the engine's."""
    code = MERGE_FUSED
    # Now the kernels are compiled, so a small merge uses them although it would not wait for the compiler.
    code += 'assert merge_weights(plan, Path("again"), device="cpu").files == record.files\n'
    code += 'import sys\nprint(sorted({"torch", "scipy.linalg"} & sys.modules.keys()))\n'
    (wide / "recipe.yaml").write_text(text)
    run = subprocess.run([sys.executable, "-c", code], cwd=wide, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_hashes_are_right_even_if_hashing_falls_behind(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Let nothing wait in memory, so that every byte is read back.
    monkeypatch.setattr("mergegate.merge_core.engine.writer.WAITING_BYTES", 0)
    record = merge_text(TIES, wide, block_elements=16384)
    for name, digest in record.files.items():
        assert hashlib.sha256((wide / "out" / name).read_bytes()).hexdigest() == digest


def test_partial_results_are_freed_before_the_next_pass(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, held = list[weakref.ref[object]](), list[int]()

    def steps() -> Steps:
        def combine(given: Sequence[object]) -> Any:
            parts.extend(map(weakref.ref, given))
            return np.zeros(1)

        yield Fold(lambda block: block.base, combine)
        held.append(sum(part() is not None for part in parts))
        return Map(lambda block: block.base)

    monkeypatch.setattr(tensor_run.TensorRun, "_steps", lambda run: steps())
    merge_text(LINEAR, wide, threads=1, block_elements=16384)
    assert len(parts) > len(held) > 0, "some tensors have several blocks"
    assert set(held) == {0}


Run = tensor_run.TensorRun


def test_each_block_of_each_pass_is_computed_once_in_any_order_of_threads(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of a pass may start the next pass before the thread of another block continues."""
    passes: dict[int, tuple[object, list[int]]] = {}

    def steps(orders: tuple[bool, ...]) -> Steps:
        for in_order in orders:
            yield Fold(lambda block: block.base, lambda parts: np.zeros(1), in_order=in_order)
        return Map(lambda block: block.base)

    class Lock:
        """A lock after whose release all waiting blocks of the pass are computed."""

        def __init__(self, run: Run, waiting: list[Callable[[], None]]) -> None:
            self.run, self.waiting = run, waiting

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            step = self.run.step
            while self.waiting and self.run.step is step:
                self.waiting.pop()()

    def begin(run: Run) -> None:
        waiting: list[Callable[[], None]] = []
        run.context = replace(run.context, submit=lambda _, work: waiting.append(work))
        run.lock = Lock(run, waiting)  # type: ignore[assignment]  # It has the methods of a lock.
        original_begin(run)
        while waiting:
            waiting.pop()()

    def compute_block(run: Run, number: int) -> None:
        passes.setdefault(id(run.step), (run.step, []))[1].append(number)
        original_compute_block(run, number)

    original_begin, original_compute_block = Run.begin, Run._compute_block
    monkeypatch.setattr(Run, "begin", begin)
    monkeypatch.setattr(Run, "_compute_block", compute_block)
    for orders in itertools.product((False, True), repeat=3):
        passes.clear()
        monkeypatch.setattr(Run, "_steps", lambda run, orders=orders: steps(orders))
        merge_text(LINEAR, wide, "".join("ny"[order] for order in orders), threads=1, block_elements=16384)
        assert len(passes) == 4
        for (_, numbers), in_order in zip(passes.values(), (*orders, False), strict=True):
            assert (numbers if in_order else sorted(numbers)) == list(range(len(numbers)))
            assert len(numbers) > 2


def test_the_seed_changes_random_masks_and_nothing_else(wide: Path) -> None:
    assert merge_text(DARE, wide, "1", seed=1).files != merge_text(DARE, wide, "2", seed=2).files
    assert merge_text(TIES, wide, "3", seed=1).files == merge_text(TIES, wide, "4", seed=2).files


def test_exactly_the_requested_number_of_elements_is_kept_despite_ties(wide: Path) -> None:
    text = TIES.replace("[{model: a}, {model: b}, {model: c}]", "[{model: a}]").replace("bfloat16", "float32")
    base, tuned = load(wide / "base"), load(wide / "a")
    for kernels in ("torch", "fused"):
        merge_text(text.replace("weight: 0.5", "weight: 1"), wide, kernels, kernels=kernels)
        for name, merged in load(wide / kernels).items():
            delta, kept = np.abs(tuned[name] - base[name]), merged != base[name]
            least = delta[kept].min()
            assert (delta == least).sum() > 100, "the case under test needs ties"
            assert kept.sum() == int(0.4 * delta.size)
            assert kept[delta > least].all()
            halves = kept.reshape(2, -1)[:, :].sum(1)
            assert abs(int(halves[0]) - int(halves[1])) < 0.05 * kept.sum(), "ties are broken evenly"


def test_the_result_keeps_the_layout_of_its_donor(tmp_path: Path) -> None:
    base = random_tensors(0)
    save_checkpoint(tmp_path / "a", base, shards=3)
    save_checkpoint(tmp_path / "b", random_tensors(1, base))
    record = merge_text(LINEAR, tmp_path)
    one, other = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "out")
    assert {n: t.file.name for n, t in one.tensors.items()} == {n: t.file.name for n, t in other.tensors.items()}
    assert record.tensors == len(base)
    assert record.parameters == sum(tensor.numel() for tensor in base.values())
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * record.parameters


def test_the_record_names_every_file_with_its_hash_and_files_of_the_donor_come_along(family: Path) -> None:
    copied = {"generation_config.json", "chat_template.jinja", "modeling_x.py"}
    for name in (*copied, "README.md", "notes.txt"):
        (family / "a" / name).write_text("{}")
    record = merge_text(LINEAR, family)
    on_disk = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (family / "out").iterdir()}
    assert dict(record.files) == on_disk
    # Templates are also in the settings of the tokenizer.
    assert set(on_disk) - {"tokenizer_config.json"} == {"config.json", "model.safetensors", "tokenizer.json", *copied}


@pytest.mark.parametrize(
    ("wanted", "stored"),
    [("", "float32"), ("dtype: bfloat16", "bfloat16"), ("dtype: bfloat16\nout_dtype: float16", "float16")],
)
def test_weights_and_config_have_the_requested_dtype(family: Path, wanted: str, stored: str) -> None:
    merge_text(LINEAR + wanted, family)
    tensors = open_checkpoint(family / "out").tensors.values()
    assert {tensor.dtype.torch_name for tensor in tensors} == {stored}
    assert json.loads((family / "out/config.json").read_text())["torch_dtype"] == stored


@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_a_bfloat16_result_is_rounded_once(family: Path, kernels: str) -> None:
    merge_text(LINEAR + "dtype: bfloat16", family, "narrow", kernels=kernels)
    merge_text(LINEAR, family, "wide", kernels=kernels)
    narrow, wide = load(family / "narrow"), load(family / "wide")
    for name, exact in wide.items():
        assert np.array_equal(torch.from_numpy(exact).bfloat16().double().numpy(), narrow[name])


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize(("other", "dtype"), [("bfloat16", "float32"), ("float64", "float64"), ("float16", "float16")])
def test_mixed_formats_are_promoted(tmp_path: Path, other: str, dtype: str, kernels: str) -> None:
    for name, kind in (("a", "float16"), ("b", other)):
        tensors = {name: tensor.to(getattr(torch, kind)) for name, tensor in random_tensors(0).items()}
        save_checkpoint(tmp_path / name, tensors)
    merge_text(LINEAR, tmp_path, kernels=kernels)
    assert {one.dtype.torch_name for one in open_checkpoint(tmp_path / "out").tensors.values()} == {dtype}
    a, b, out = (load(tmp_path / name)["lm_head.weight"] for name in ("a", "b", "out"))
    np.testing.assert_allclose(out, (a + b) / 2, rtol=1e-6)


def test_integers_are_copied_if_equal_and_refused_otherwise(tmp_path: Path) -> None:
    for name, number in (("a", 7), ("b", 7), ("c", 8)):
        save_checkpoint(tmp_path / name, {**random_tensors(0), "counter": torch.full((3,), number)})
    merge_text(LINEAR, tmp_path)
    assert load(tmp_path / "out")["counter"].tolist() == [7, 7, 7]
    with pytest.raises(InvalidInput, match="c: counter"):
        merge_text(LINEAR.replace("model: b", "model: c"), tmp_path, "refused")


@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_infinity_from_finite_parents_is_found_in_the_result(tmp_path: Path, kernels: str) -> None:
    tensors = random_tensors(0)
    tensors["model.norm.weight"][3] = 6e4  # The sum of the two parents exceeds float16.
    for name in "ab":
        save_checkpoint(tmp_path / name, tensors)
    text = LINEAR.replace("weight: 1", "weight: 1, normalize: false") + "dtype: float16"
    (finding,) = merge_text(text, tmp_path, kernels=kernels).findings
    assert (finding.severity, finding.where) == ("block", "model.norm.weight")
    assert finding.found.startswith("1 element")


def test_a_full_disk_stops_the_merge_and_leaves_nothing_that_loads(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskUnavailable, match="disk is full"):
        merge_text(LINEAR, family)
    assert not (family / "out/config.json").exists()


@pytest.mark.parametrize("position", ["first", "later", "end of a range"])
@pytest.mark.parametrize("problem", ["truncated", errno.EIO, errno.ESTALE, errno.EBADF])
def test_a_shard_that_cannot_be_read_back_stops_the_merge(
    wide: Path, monkeypatch: pytest.MonkeyPatch, problem: int | str, position: str
) -> None:
    reads: list[int] = []

    def read_at(fd: int, into: memoryview, offset: int) -> int:
        reads.append(offset)
        assert len(reads) < 100, "the loop does not end"
        if position != "first" and len(reads) == 1:
            return original(fd, into[: len(into) // 2 if position == "later" else -1], offset)
        if isinstance(problem, int):
            raise OSError(problem, os.strerror(problem))
        return 0

    original = writer.read_at
    monkeypatch.setattr(writer, "read_at", read_at)
    monkeypatch.setattr(writer, "WAITING_BYTES", 0)
    with pytest.raises(DiskUnavailable) as caught:
        merge_text(LINEAR, wide)
    reason = os.strerror(problem) if isinstance(problem, int) else "the file was truncated while it was written"
    assert caught.value.where.endswith(".safetensors.partial")
    assert reason in caught.value.found
    assert not (wide / "out/config.json").exists()


def test_progress_ends_at_the_total_and_is_reported_in_the_callers_thread(family: Path) -> None:
    calls: list[tuple[int, int, int]] = []
    plan = plan_recipe(LINEAR, family)

    def on_progress(done: int, total: int) -> None:
        calls.append((done, total, threading.get_ident()))

    merge_weights(plan, family / "out", on_progress=on_progress, settings=EngineSettings(threads=2))
    assert calls[-1][0] == calls[-1][1] == plan.bytes_written
    assert {ident for *_, ident in calls} == {threading.get_ident()}
    assert calls == sorted(calls, key=lambda call: call[0])

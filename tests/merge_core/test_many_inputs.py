"""Merges of many sharded checkpoints or many tensors read each byte once, with few open files and limited blocks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import load_benchmark
from family import load, merge_text, open_models, plan_recipe, random_tensors, save_checkpoint

from mergegate.flows.operations.merge import clear_recipe
from mergegate.merge_core import EngineSettings, load_recipe, open_checkpoint, plan_merge, system
from mergegate.merge_core.architecture import parse_layer_place
from mergegate.merge_core.checkpoint import checkpoint as checkpoint_file
from mergegate.merge_core.engine import InputFiles, block_size
from mergegate.merge_core.engine import input_files as engine_files
from mergegate.merge_core.engine.forecast import estimate_needs, forecast
from mergegate.merge_core.errors import ChangedInput, InvalidInput
from mergegate.merge_core.plan import job_builder
from mergegate.merge_core.recipe import Recipe, value_for

COUNT, SHARDS = 32, 3
EPSILON = 2.0**-24  # unit roundoff of float32


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of 32 checkpoints in bfloat16, each in three files."""
    root = tmp_path_factory.mktemp("run")
    start = random_tensors(0)
    for number in range(COUNT):
        tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(number + 1, start).items()}
        save_checkpoint(root / f"checkpoint-{number}", tensors, shards=SHARDS)
    return root


def linear(models: list[str], weight: float, dtype: str) -> str:
    entries = ", ".join(f"{{model: {model}, parameters: {{weight: {weight!r}}}}}" for model in models)
    return f"merge_method: linear\nmodels: [{entries}]\nparameters: {{normalize: false}}\ndtype: {dtype}\n"


def checkpoints(count: int) -> list[str]:
    return [f"checkpoint-{number}" for number in range(count)]


@pytest.mark.story
def test_each_input_is_read_once_with_few_open_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_files, "open_file_limit", lambda: 64)
    read, most_open, read_at = Counter[str](), 0, os.preadv

    def open_inputs() -> int:
        paths = set[str]()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # Another thread has closed the file meanwhile.
                paths.add(str(link.readlink()))
        return sum(path.startswith(str(run)) for path in paths)

    def watched(fd: int, buffers: Any, offset: int) -> int:
        nonlocal most_open
        count = read_at(fd, buffers, offset)
        if (path := str(Path(f"/proc/self/fd/{fd}").readlink())).startswith(str(run)):
            read[path] += count
            most_open = max(most_open, open_inputs())
        return count

    monkeypatch.setattr(system.os, "preadv", watched)
    merge_text(linear(checkpoints(COUNT), 1 / COUNT, "bfloat16"), run, str(tmp_path / "out"), threads=4)
    stored = Counter[str]()
    for model in checkpoints(COUNT):
        for tensor in open_checkpoint(run / model).tensors.values():
            stored[str(tensor.file)] += tensor.nbytes
    assert len(stored) == COUNT * SHARDS
    assert read == stored
    assert most_open <= 64 // 4 + 4  # a quarter of the limit, and one file per thread


@pytest.mark.story
@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_the_mean_is_within_the_stated_rounding_of_float64(run: Path, tmp_path: Path, kernels: str) -> None:
    merge_text(linear(checkpoints(COUNT), 1 / COUNT, "float32"), run, str(tmp_path / "out"), kernels=kernels)
    inputs = [load(run / model) for model in checkpoints(COUNT)]
    for name, merged in load(tmp_path / "out").items():
        stacked = np.stack([tensors[name] for tensors in inputs])
        bound = COUNT * EPSILON * np.abs(stacked).mean(0)
        assert np.all(np.abs(merged - stacked.mean(0)) <= bound)


@pytest.mark.story
def test_a_running_sum_gives_the_same_bytes_as_the_sum_of_all_checkpoints(run: Path, tmp_path: Path) -> None:
    """The sum in float32 is the state: one more checkpoint costs one read of it."""
    state = tmp_path / "sum-30"
    merge_text(linear(checkpoints(30), 1.0, "float32"), run, str(state))
    for count in range(31, COUNT + 1):
        state, before = tmp_path / f"sum-{count}", state
        merge_text(linear([str(before), f"checkpoint-{count - 1}"], 1.0, "float32"), run, str(state))
    merge_text(linear(checkpoints(COUNT), 1.0, "float32"), run, str(tmp_path / "all"))
    inputs = [load(run / model) for model in checkpoints(COUNT)]
    for directory in (state, tmp_path / "all"):
        for name, total in load(directory).items():
            expected = np.zeros(total.shape, np.float32)
            for tensors in inputs:
                expected += tensors[name].astype(np.float32)
            assert np.array_equal(total, expected)


def test_blocks_have_whole_grains_and_a_limited_size(run: Path) -> None:
    plan = plan_recipe(linear(checkpoints(COUNT), 1.0, "bfloat16"), run)
    for count, grain in product((1, 2, 8, 32, 128, 4096), (1, 576, 16384, 1 << 22)):
        job = replace(plan.jobs[0], inputs=(plan.jobs[0].inputs * 128)[:count])
        size = block_size(job, grain, 1 << 20)
        assert size % grain == 0
        assert size == grain or (size <= 1 << 20 and size * job.inputs[0].tensor.dtype.size * count <= 32 << 20)
    assert block_size(replace(plan.jobs[0], inputs=plan.jobs[0].inputs[:8]), 16384, 1 << 20) == 1 << 20


def test_a_file_that_was_replaced_while_it_was_closed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_files, "open_file_limit", lambda: 4)  # one file stays open
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(b"old")

    def read_all(files: InputFiles) -> None:
        for path in paths:
            with files.open(path) as fd:
                os.pread(fd, 3, 0)

    def exchange() -> None:
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").replace(paths[0])

    for change in (exchange, paths[0].unlink, lambda: paths[0].write_bytes(b"longer")):
        paths[0].write_bytes(b"old")
        # The exit must refuse the changed file too.
        with pytest.raises(ChangedInput, match="changed or was"), InputFiles(paths) as files:  # noqa: PT012
            read_all(files)
            change()
            with pytest.raises(ChangedInput, match="changed or was replaced"):
                read_all(files)
    with pytest.raises(InvalidInput, match="cannot be read"):
        InputFiles([tmp_path / "missing"])


huge = load_benchmark("huge_plan")
LAYERS, DENSE, EXPERTS, FILES = 6, 2, 8, 5
SHAPES = huge.deepseek_shapes(LAYERS, EXPERTS, DENSE)
# One filter and one gradient distinguish the tensors.
FILTERED = {"weight": [{"filter": "down_proj", "value": 0.25}, {"value": [0.5, 1.0]}]}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("huge")
    for name in ("one", "two"):
        huge.write_sparse(place / name, SHAPES, FILES)
        config = (place / name / "config.json").read_text()
        (place / name / "config.json").write_text(config.replace(f": {huge.LAYERS},", f": {LAYERS},"))
    return place


def recipe_in(place: Path) -> Recipe:
    models = [{"model": str(place / name)} for name in ("one", "two")]
    return load_recipe({"merge_method": "linear", "models": models, "parameters": FILTERED})


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, key: Callable[..., Any]) -> Counter[Any]:
    """Count the calls of a function, grouped by ``key`` of their arguments."""
    seen: Counter[Any] = Counter()
    real = getattr(module, name)

    def counted(*words: Any, **more: Any) -> Any:
        seen[key(*words)] += 1
        return real(*words, **more)

    monkeypatch.setattr(module, name, counted)
    return seen


def test_the_generated_shapes_match_the_real_model() -> None:
    assert len(huge.deepseek_shapes()) == 45_395


def test_each_header_and_each_name_is_parsed_once(mixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = counting(monkeypatch, checkpoint_file, "read_header", lambda path: path)
    parse_layer_place.cache_clear()
    cleared = clear_recipe(recipe_in(mixtures))
    assert len(cleared.plan.jobs) == len(SHAPES)
    assert len(headers) == 2 * FILES
    assert set(headers.values()) == {1}
    assert parse_layer_place.cache_info().misses <= len(SHAPES) + LAYERS  # names of both models, and some lookups


def test_values_and_costs_are_computed_once_per_kind_of_tensor(mixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_in(mixtures)
    opened = open_models(recipe, mixtures)
    asked = counting(monkeypatch, job_builder, "value_for", lambda parameter, *_: parameter.name)
    costs = counting(monkeypatch, forecast, "work_of", lambda method, _: method.name)
    plan = plan_merge(recipe, opened)
    needs = estimate_needs(plan, EngineSettings(), cores=1, device="cpu")
    # Two inputs, filtered or not, inside and outside of each layer.
    assert asked["weight"] <= 2 * 2 * (LAYERS + 1)
    shapes = len(set(SHAPES.values()))
    assert sum(costs.values()) <= 2 * shapes * (LAYERS + 1)
    assert needs.tensors == len(SHAPES)
    assert needs.bytes_passed == plan.bytes_read == sum(job.nbytes_in for job in plan.jobs)


def test_shared_values_equal_the_values_of_each_tensor_alone(mixtures: Path) -> None:
    recipe = recipe_in(mixtures)
    weight = recipe.method.parameter("weight")
    assert weight is not None
    for job in plan_merge(recipe, open_models(recipe, mixtures)).jobs:
        at = parse_layer_place(job.output.name)
        t = at.index / (LAYERS - 1) if at else 0.0
        wanted = value_for(weight, (recipe.parameters,), job.output.name, t)
        assert [own["weight"] for own in job.per_input] == [wanted, wanted], job.output.name

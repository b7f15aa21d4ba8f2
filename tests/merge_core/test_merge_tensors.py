"""An in-memory merge yields the same bytes and refusals as a merge to files. ``merge`` does all steps in one call."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family import LINEAR, plan_recipe, random_tensors, recipe_of, save_checkpoint, save_tokenizer
from safetensors.torch import load_file
from samples import sampled
from test_quantised import FP8, MATRIX, MXFP4, fp8_weights, mxfp4_weights, saved
from tiny_families import BY_NAME, load, make, save

from mergegate import merge_core
from mergegate.merge_core import (
    EngineSettings,
    MergePlan,
    load_recipe,
    merge,
    merge_methods,
    merge_tensors,
    merge_weights,
)
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused

WAYS: list[dict[str, Any]] = [{}, {"block_elements": 32768, "threads": 3}, {"kernels": "fused"}]


def written(plan: MergePlan, out: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Merge to files and return their tensors in storage order, as read by the safetensors library."""
    merge_weights(plan, out, seed=seed, device="cpu")
    found = {}
    for shard in plan.shards:
        tensors = load_file(out / shard.name)
        found |= {tensor.name: tensors[tensor.name.rpartition("/")[2]] for tensor in shard.stored}
    return found


def require_same_bits(plan: MergePlan, out: Path, seed: int = 0, **way: Any) -> None:
    expected = written(plan, out, seed)
    ours = dict(merge_tensors(plan, seed=seed, settings=EngineSettings(**way)))
    assert list(ours) == list(expected)
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(bits(tensor), bits(expected[name])), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("method", sampled(sorted(merge_methods()), ("della", "karcher", "model_stock", "sce")))
def test_every_method_gives_the_bytes_of_the_files_for_any_blocks_and_threads(wide: Path, method: str) -> None:
    plan = plan_recipe(recipe_of(method), wide)
    expected = written(plan, wide / "out", seed=7)
    for way in WAYS:
        ours = dict(merge_tensors(plan, seed=7, settings=EngineSettings(**way)))
        assert list(ours) == list(expected)
        assert all(torch.equal(bits(ours[name]), bits(expected[name])) for name in expected), way


DARE = "merge_method: dare_ties\nbase_model: a\nmodels: [{{model: {}}}]\nparameters: {{weight: 0.5, density: 0.5}}\n"
STEPS = f"""name: first
{DARE.format("b")}---
name: second
{DARE.format("first")}dtype: bfloat16
---
{LINEAR.replace("{model: a}, {model: b}", "{model: first}, {model: second}, {model: c}")}"""
SLICES = """merge_method: passthrough
slices:
- sources: [{model: a, layer_range: [0, 2]}]
- sources: [{model: b, layer_range: [1, 3]}]
"""


def plan_of_kind(kind: str, root: Path) -> MergePlan:
    """Write models and plan a merge with jobs of one kind."""
    if kind in ("FP8", "MXFP4"):
        for seed, name in enumerate("ab"):
            weights, settings = (fp8_weights(seed), FP8) if kind == "FP8" else (mxfp4_weights(seed), MXFP4)
            saved(root / name, weights, settings)
        return plan_recipe(LINEAR, root)
    if kind == "fused experts":
        family = BY_NAME["qwen3_moe"]
        for seed, name in enumerate("ab"):
            save(family, load(family, make(family, root / f"{name}-one-by-one", seed)), root / name, fused=True)
        return plan_recipe(LINEAR, root)
    text, tensors = LINEAR, {name: random_tensors(seed) for seed, name in enumerate("abc")}
    match kind:
        case "several formats":
            tensors["b"] = {name: tensor.double() for name, tensor in tensors["b"].items()}
            tensors["a"]["counter"] = tensors["b"]["counter"] = torch.arange(3)
            text += "out_dtype: float16"
        case "steps" | "slices":
            text = STEPS if kind == "steps" else SLICES
        case "different vocabularies":
            tensors["b"] = random_tensors(1, tokens=26)
            text += "tokenizer_source: b\n"
        case "tied and untied":
            del tensors["b"]["lm_head.weight"]
    for name, own in tensors.items():
        save_checkpoint(root / name, own, shards=3 if (kind, name) in (("shards", "a"), ("steps", "a")) else 1)
    if kind == "different vocabularies":
        save_tokenizer(root / "b", ["new", "more", *[f"t{number}" for number in reversed(range(24))]])
    return plan_recipe(text, root)


KINDS = ("shards", "several formats", "steps", "different vocabularies", "tied and untied", "slices")


@pytest.mark.parametrize("kind", [*KINDS, "FP8", "MXFP4", "fused experts"])
def test_every_kind_of_job_gives_the_bytes_of_the_files(tmp_path: Path, kind: str) -> None:
    plan = plan_of_kind(kind, tmp_path)
    assert kind != "FP8" or MATRIX in {job.output.name for job in plan.jobs}
    pieces = max(len(tensor.pieces) for shard in plan.shards for tensor in shard.stored)
    assert kind != "fused experts" or pieces > 1
    require_same_bits(plan, tmp_path / "out", seed=3, block_elements=16, threads=2)
    # The plan contains the configuration from which a caller builds a network.
    assert json.loads((tmp_path / "out/config.json").read_text()) == dict(plan.config)


def test_selected_tensors_are_computed_in_any_order(family: Path) -> None:
    plan = plan_recipe(LINEAR, family)
    every = dict(merge_tensors(plan))
    wanted = ["model.norm.weight", "lm_head.weight"]
    some = list(merge_tensors(plan, names=wanted))
    assert [name for name, _ in some] == wanted
    assert all(torch.equal(tensor, every[name]) for name, tensor in some)
    with pytest.raises(InvalidInput, match="no tensor elsewhere"):
        next(merge_tensors(plan, names=["elsewhere"]))


def error_text(act: Callable[[], object]) -> str:
    with pytest.raises(MergegateError) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize("problem", ["NaN in a parent", "different integers", "infinity in the result", "only zeros"])
def test_a_problem_is_refused_with_the_same_message_as_for_files(tmp_path: Path, problem: str) -> None:
    text, norm = LINEAR, "model.norm.weight"
    a, b = random_tensors(0), random_tensors(0)
    match problem:
        case "NaN in a parent":
            b[norm][3] = float("nan")
        case "different integers":
            a["counter"], b["counter"] = torch.full((3,), 7), torch.full((3,), 8)
        case "infinity in the result":
            a[norm][3] = b[norm][3] = 6e4  # The sum of the two parents exceeds float16.
            text = LINEAR.replace("weight: 1", "weight: 1, normalize: false") + "dtype: float16"
        case "only zeros":
            b[norm] = -a[norm]
    for name, tensors in (("a", a), ("b", b)):
        save_checkpoint(tmp_path / name, tensors)
    plan = plan_recipe(text, tmp_path)
    if problem in ("NaN in a parent", "different integers"):
        expected = error_text(lambda: merge_weights(plan, tmp_path / "out"))
    else:
        (finding,) = merge_weights(plan, tmp_path / "out").findings
        assert finding.severity == "block"
        expected = str(finding.refusal())
    assert error_text(lambda: list(merge_tensors(plan))) == expected
    assert error_text(lambda: list(merge_tensors(plan, settings=EngineSettings(threads=3)))) == expected


def test_a_replaced_input_file_is_detected(family: Path) -> None:
    plan = plan_recipe(LINEAR, family)
    tensors = merge_tensors(plan)
    next(tensors)
    content = (family / "b/model.safetensors").read_bytes()
    (family / "b/model.safetensors").unlink()
    (family / "b/model.safetensors").write_bytes(content)
    assert "changed" in error_text(lambda: list(tensors)) or "replaced" in error_text(lambda: list(tensors))


def test_torch_threads_are_restored_when_the_iteration_ends_or_is_closed(family: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        plan = plan_recipe(LINEAR, family)
        list(merge_tensors(plan))
        assert torch.get_num_threads() == 2
        begun = merge_tensors(plan)
        next(begun)
        begun.close()  # type: ignore[attr-defined]  # It is a generator.
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_only_one_tensor_is_in_memory(tmp_path: Path) -> None:
    rows, width, layers = 512, 256, 8
    shapes = {"model.embed_tokens.weight": (8, width)}
    shapes |= {f"model.layers.{n}.mlp.up_proj.weight": (rows, width) for n in range(layers)}
    for seed, name in enumerate("ab"):
        generator = torch.Generator().manual_seed(seed)
        tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        save_checkpoint(tmp_path / name, tensors, config={"num_hidden_layers": layers})
    plan = plan_recipe(LINEAR, tmp_path)
    list(merge_tensors(plan))  # Load all imports before measuring.
    tracemalloc.start()
    try:
        for _ in merge_tensors(plan, settings=EngineSettings(block_elements=1 << 14)):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    one = rows * width * 4
    assert peak < 3 * one, f"{peak / one:.1f} tensors of {layers}"


@pytest.fixture
def recipe_file(family: Path) -> Path:
    file = family / "ties.yaml"
    file.write_text(recipe_of("ties"))
    return file


def test_dir_lists_every_public_name() -> None:
    assert set(merge_core.__all__) <= set(dir(merge_core))
    assert all(getattr(merge_core, name) is not None for name in dir(merge_core))


def test_merge_writes_what_the_single_steps_write(recipe_file: Path, tmp_path: Path) -> None:
    plan = plan_recipe(recipe_file.read_text(), tmp_path)
    expected = merge_weights(plan, tmp_path / "expected", seed=3, device="cpu")
    progress: list[tuple[int, int]] = []
    record = merge(recipe_file, tmp_path / "out", seed=3, device="cpu", on_progress=lambda *done: progress.append(done))
    assert record.files == expected.files
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(record.files)
    assert progress[-1] == (record.bytes_written, record.bytes_written)
    by_text = merge(str(recipe_file), str(tmp_path / "by-text"), device="cpu")
    assert merge(load_recipe(recipe_file), tmp_path / "by-recipe", device="cpu").files == by_text.files


def test_merge_refuses_existing_directories_models_that_do_not_fit_and_models_on_the_hub(
    recipe_file: Path, tmp_path: Path
) -> None:
    wider = save_checkpoint(tmp_path / "wider", random_tensors(0, layers=2))
    text = recipe_file.read_text()
    for model, out, error, words in (
        ("a", "a", InvalidInput, "exists"),
        (wider, "out", Refused, "2 layers instead of 3"),
        ("org/name", "out", InvalidInput, "mergegate merge"),
    ):
        recipe_file.write_text(text.replace("model: a", f"model: {model}"))
        with pytest.raises(error, match=words):
            merge(recipe_file, tmp_path / out, device="cpu")
        assert not list(tmp_path.glob("out*"))


def test_recipes_that_need_measurements_are_refused_before_anything_is_written(tmp_path: Path, family: Path) -> None:
    file = family / "recipe.yaml"
    refused = []
    for method in sorted(merge_methods()):
        file.write_text(recipe_of(method))
        recipe = load_recipe(file)
        if recipe.needs_distances or recipe.texts:
            refused.append(method)
            with pytest.raises(InvalidInput, match="measure first"):
                merge(file, tmp_path / "out", device="cpu")
            assert not list(tmp_path.glob("out*"))
    assert refused

"""An in-memory merge yields the same bytes and refusals as a merge to files, and uses little memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family import random_tensors, read_recipe, recipe_of, save_checkpoint, save_tokenizer
from safetensors.torch import load_file
from test_quantised import MATRIX, MXFP4, fp8_weights, mxfp4_weights, saved
from tiny_families import BY_NAME, load, make, save

from mergegate.merge_core import (
    EngineSettings,
    MergePlan,
    merge_methods,
    merge_tensors,
    merge_weights,
    open_checkpoint,
    plan_merge,
)
from mergegate.merge_core.errors import InvalidInput, MergegateError

LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"
WAYS: list[dict[str, Any]] = [{}, {"block_elements": 32768, "threads": 3}, {"kernels": "fused"}]


def planned(text: str, root: Path) -> MergePlan:
    recipe = read_recipe(text, root)
    return plan_merge(recipe, {str(ref): open_checkpoint(root / ref.path) for ref in recipe.references()})


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


@pytest.mark.parametrize("method", sorted(merge_methods()))
def test_every_method_gives_the_bytes_of_the_files_for_any_blocks_and_threads(wide: Path, method: str) -> None:
    plan = planned(recipe_of(method), wide)
    expected = written(plan, wide / "out", seed=7)
    for way in WAYS:
        ours = dict(merge_tensors(plan, seed=7, settings=EngineSettings(**way)))
        assert list(ours) == list(expected)
        assert all(torch.equal(bits(ours[name]), bits(expected[name])) for name in expected), way


def sharded(root: Path) -> MergePlan:
    save_checkpoint(root / "a", random_tensors(0), shards=3)
    save_checkpoint(root / "b", random_tensors(1))
    return planned(LINEAR, root)


def of_several_formats(root: Path) -> MergePlan:
    counter = {"counter": torch.arange(3)}
    save_checkpoint(root / "a", {**random_tensors(0), **counter})
    save_checkpoint(root / "b", {name: t.double() for name, t in random_tensors(1).items()} | counter)
    return planned(LINEAR + "out_dtype: float16", root)


def of_steps(root: Path) -> MergePlan:
    for seed, name in enumerate("abc"):
        save_checkpoint(root / name, random_tensors(seed), shards=2 if name == "a" else 1)
    dare = (
        "merge_method: dare_ties\nbase_model: a\nmodels: [{{model: {}}}]\nparameters: {{weight: 0.5, density: 0.5}}\n"
    )
    return planned(
        f"name: first\n{dare.format('b')}---\nname: second\n{dare.format('first')}dtype: bfloat16\n---\n"
        "merge_method: linear\nmodels: [{model: first}, {model: second}, {model: c}]\nparameters: {weight: 1}\n",
        root,
    )


def of_other_vocabularies(root: Path) -> MergePlan:
    save_checkpoint(root / "a", random_tensors(0))
    save_checkpoint(root / "b", random_tensors(1, tokens=26))
    save_tokenizer(root / "b", ["new", "more", *[f"t{number}" for number in reversed(range(24))]])
    return planned(LINEAR + "tokenizer_source: b\n", root)


def of_tied_and_untied(root: Path) -> MergePlan:
    save_checkpoint(root / "a", random_tensors(0))
    save_checkpoint(root / "b", {name: t for name, t in random_tensors(1).items() if name != "lm_head.weight"})
    return planned(LINEAR, root)


def of_quantised(root: Path) -> MergePlan:
    for seed, name in enumerate("ab"):
        weights = fp8_weights(seed)
        quantisation = {"quant_method": "fp8", "weight_block_size": [16, 24], "fmt": "e4m3"}
        saved(root / name, weights, {**quantisation, "activation_scheme": "dynamic"})
    plan = planned(LINEAR, root)
    assert MATRIX in {job.output.name for job in plan.jobs}
    return plan


def of_packed(root: Path) -> MergePlan:
    for seed, name in enumerate("ab"):
        saved(root / name, mxfp4_weights(seed), MXFP4)
    return planned(LINEAR, root)


def of_slices(root: Path) -> MergePlan:
    for seed, name in enumerate("ab"):
        save_checkpoint(root / name, random_tensors(seed))
    return planned(
        "merge_method: passthrough\nslices:\n- sources: [{model: a, layer_range: [0, 2]}]\n"
        "- sources: [{model: b, layer_range: [1, 3]}]\n",
        root,
    )


def of_experts(root: Path) -> MergePlan:
    family = BY_NAME["qwen3_moe"]
    for seed, name in enumerate("ab"):
        model = load(family, make(family, root / f"{name}-one-by-one", seed))
        save(family, model, root / name, fused=True)
    plan = planned(LINEAR, root)
    assert any(len(tensor.pieces) > 1 for shard in plan.shards for tensor in shard.stored)
    return plan


@pytest.mark.parametrize(
    "make_plan",
    [
        sharded,
        of_several_formats,
        of_steps,
        of_other_vocabularies,
        of_tied_and_untied,
        of_quantised,
        of_packed,
        of_slices,
        of_experts,
    ],
)
def test_every_kind_of_job_gives_the_bytes_of_the_files(tmp_path: Path, make_plan: Callable[[Path], MergePlan]) -> None:
    plan = make_plan(tmp_path)
    for number, way in enumerate([{}, {"block_elements": 16, "threads": 2}]):
        require_same_bits(plan, tmp_path / f"out{number}", seed=3, **way)


def test_the_seed_has_the_same_effect_as_for_files(wide: Path) -> None:
    plan = planned(recipe_of("dare_linear"), wide)
    (one, other) = (next(merge_tensors(plan, seed=seed))[1] for seed in (1, 2))
    assert not torch.equal(one, other)


def test_selected_tensors_are_computed_in_any_order(family: Path) -> None:
    plan = planned(LINEAR, family)
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


def test_nan_in_a_parent_is_refused_with_the_same_message_as_for_files(family: Path) -> None:
    tensors = load_file(family / "b/model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_checkpoint(family / "broken", tensors)
    plan = planned(LINEAR.replace("model: b", "model: broken"), family)
    refused = error_text(lambda: list(merge_tensors(plan)))
    assert refused == error_text(lambda: merge_weights(plan, family / "out"))
    assert refused == error_text(lambda: list(merge_tensors(plan, settings=EngineSettings(threads=3))))


def test_different_integers_are_refused_with_the_same_message_as_for_files(tmp_path: Path) -> None:
    for name, number in (("a", 7), ("b", 8)):
        save_checkpoint(tmp_path / name, {**random_tensors(0), "counter": torch.full((3,), number)})
    plan = planned(LINEAR, tmp_path)
    assert error_text(lambda: list(merge_tensors(plan))) == error_text(lambda: merge_weights(plan, tmp_path / "out"))


def test_a_blocking_finding_of_the_record_is_raised(tmp_path: Path) -> None:
    tensors = random_tensors(0)
    tensors["model.norm.weight"][3] = 6e4  # The sum of the two parents exceeds float16.
    for name in "ab":
        save_checkpoint(tmp_path / name, tensors)
    text = LINEAR.replace("weight: 1", "weight: 1, normalize: false") + "dtype: float16"
    plan = planned(text, tmp_path)
    (finding,) = merge_weights(plan, tmp_path / "out").findings
    assert error_text(lambda: list(merge_tensors(plan))) == str(finding.refusal())


def test_zeros_from_nonzero_parents_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(0)
    save_checkpoint(tmp_path / "a", tensors)
    save_checkpoint(tmp_path / "b", {name: -tensor for name, tensor in tensors.items()})
    plan = planned(LINEAR, tmp_path)
    finding = merge_weights(plan, tmp_path / "out").findings[0]
    assert finding.severity == "block"
    assert error_text(lambda: list(merge_tensors(plan))).splitlines()[0] == str(finding.refusal()).splitlines()[0]


def test_a_tensor_that_is_zero_in_every_parent_is_accepted(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        save_checkpoint(tmp_path / name, random_tensors(seed) | {"model.norm.weight": torch.zeros(12)})
    assert not dict(merge_tensors(planned(LINEAR, tmp_path)))["model.norm.weight"].any()


def test_a_replaced_input_file_is_detected(family: Path) -> None:
    plan = planned(LINEAR, family)
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
        plan = planned(LINEAR, family)
        list(merge_tensors(plan))
        assert torch.get_num_threads() == 2
        begun = merge_tensors(plan)
        next(begun)
        begun.close()  # type: ignore[attr-defined]  # It is a generator.
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_only_one_tensor_is_in_memory(tmp_path: Path) -> None:
    rows, width, layers = 1024, 256, 12
    for seed, name in enumerate("ab"):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            f"model.layers.{n}.mlp.up_proj.weight": torch.randn(rows, width, generator=generator) for n in range(layers)
        }
        save_checkpoint(
            tmp_path / name,
            {"model.embed_tokens.weight": torch.randn(8, width, generator=generator), **tensors},
            config={"num_hidden_layers": layers},
        )
    plan = planned(LINEAR, tmp_path)
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


def test_the_config_equals_that_of_the_files(family: Path) -> None:
    """The plan contains the configuration from which a caller builds a network."""
    plan = planned(LINEAR, family)
    merge_weights(plan, family / "out")
    assert json.loads((family / "out/config.json").read_text()) == dict(plan.config)

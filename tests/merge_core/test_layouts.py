"""Checkpoints of one architecture can differ in layout: older names, layers after the last one, packed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family import LINEAR, check_recipe, random_tensors, save_checkpoint
from family_table import WHOLE, merge_or_refuse, recipe_of
from in_memory import average, stack
from safetensors.torch import load_file, save_file
from tiny_families import BY_NAME, LAYERS, load, logits, make

from mergegate.merge_core import Finding


def findings(root: Path, text: str = WHOLE) -> tuple[Finding, ...]:
    return check_recipe(text, root).findings


def blocking(root: Path, text: str = WHOLE) -> list[Finding]:
    return [finding for finding in findings(root, text) if finding.severity == "block"]


def rename(directory: Path, pairs: list[tuple[str, str]]) -> None:
    """Write a checkpoint's tensors under other names, replacing the first matching prefix of each."""
    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        old, new = next(((old, new) for old, new in pairs if name.startswith(old)), ("", ""))
        tensors[new + name.removeprefix(old)] = tensor
    save_file(tensors, path, {"format": "pt"})


# LLaVA's name prefixes as transformers 5 writes them → its prefixes in memory.
_TOWERS = ("vision_tower.", "multi_modal_projector.")
_LLAVA = [
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    *((tower, f"model.{tower}") for tower in _TOWERS),
]
NEWER = {
    "gemma3, vision": _LLAVA,
    "llava": _LLAVA,
    "qwen2_5_vl": [("visual.", "model.visual."), ("model.", "model.language_model.")],
}


@pytest.mark.story
@pytest.mark.parametrize("renamed", ["a", "b"])
@pytest.mark.parametrize("name", NEWER)
def test_parents_with_older_and_newer_names_merge_like_equally_named_ones(
    name: str, renamed: str, tmp_path: Path
) -> None:
    family = BY_NAME[name]
    models = [load(family, make(family, tmp_path / one, seed)) for seed, one in enumerate("ab")]
    before = set(load_file(tmp_path / renamed / "model.safetensors"))
    rename(tmp_path / renamed, NEWER[name])
    assert set(load_file(tmp_path / renamed / "model.safetensors")) != before
    assert merge_or_refuse(WHOLE, tmp_path, "out") is None
    result = load(family, tmp_path / "out")
    assert torch.equal(logits(family, result), logits(family, average(models, [0.3, 0.7])))
    # The result has the donor's layout.
    assert set(load_file(tmp_path / "out/model.safetensors")) == set(load_file(tmp_path / "a/model.safetensors"))


def test_unexplained_names_are_reported_as_missing(tmp_path: Path) -> None:
    family = BY_NAME["llava"]
    for seed, one in enumerate("ab"):
        make(family, tmp_path / one, seed)
    rename(tmp_path / "b", [("vision_tower.", "eyes.")])
    assert any("vision_tower" in finding.where for finding in blocking(tmp_path))


def with_predictions(directory: Path, seed: int, depth: int = LAYERS, *, said: bool = True) -> None:
    """Add a multi-token prediction layer after the last layer, as in published checkpoints."""
    path, generator = directory / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors, last, behind = load_file(path), f"model.layers.{depth - 1}.", f"model.layers.{depth}."
    shapes = {name.replace(last, behind): one.shape for name, one in tensors.items() if name.startswith(last)}
    for part in ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "embed_tokens.weight"):
        shapes[f"{behind}{part}"] = torch.Size((4, 4))
    extra = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file({**tensors, **extra}, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("num_nextn_predict_layers", "num_mtp_layers")}
    (directory / "config.json").write_text(json.dumps(config | ({"num_nextn_predict_layers": 1} if said else {})))


@pytest.mark.story
@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_multi_token_prediction_layers_are_merged_with_whole_models(name: str, said: bool, tmp_path: Path) -> None:
    for seed, one in enumerate("ab"):
        with_predictions(make(BY_NAME[name], tmp_path / one, seed), seed, said=said)
    assert [one for one in findings(tmp_path) if one.severity != "info"] == []
    assert merge_or_refuse(WHOLE, tmp_path, "out") is None
    a, b, out = (load_file(tmp_path / one / "model.safetensors") for one in ("a", "b", "out"))
    assert set(out) == set(a)
    part = f"model.layers.{LAYERS}.eh_proj.weight"
    assert torch.equal(out[part], 0.3 * a[part] + 0.7 * b[part])


@pytest.mark.story
def test_slices_drop_multi_token_prediction_layers_with_a_warning(tmp_path: Path) -> None:
    family = BY_NAME["glm4_moe"]
    models = {}
    for seed, one in enumerate("ab"):
        models[one] = load(family, make(family, tmp_path / one, seed))
        with_predictions(tmp_path / one, seed)
    cut = [("a", 0, 4), ("b", 3, LAYERS)]
    said = [finding for finding in findings(tmp_path, recipe_of(cut)) if "predict" in finding.found]
    assert [finding.severity for finding in said] == ["warn", "warn"]
    assert merge_or_refuse(recipe_of(cut), tmp_path, "out") is None
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    chosen = [(models[model], index) for model, start, end in cut for index in range(start, end)]
    assert torch.equal(logits(family, load(family, tmp_path / "out")), logits(family, stack(chosen, LAYERS)))


@pytest.mark.story
def test_multi_token_prediction_layers_stay_if_all_layers_keep_their_numbers(tmp_path: Path) -> None:
    for seed, one in enumerate("ab"):
        with_predictions(make(BY_NAME["glm4_moe"], tmp_path / one, seed), seed)
    assert merge_or_refuse(recipe_of([("a", 0, 3), ("b", 3, LAYERS)]), tmp_path, "out") is None
    b, out = (load_file(tmp_path / one / "model.safetensors") for one in ("b", "out"))
    part = f"model.layers.{LAYERS}.eh_proj.weight"
    assert torch.equal(out[part], b[part])


def test_more_layers_than_the_config_states_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_checkpoint(tmp_path / name, random_tensors(0, layers=3), config={"num_hidden_layers": 2})
    assert "a: config.json: num_hidden_layers" in [one.where for one in blocking(tmp_path)]


PACKED = [
    ("mlp.experts.gate_up_proj_blocks", torch.uint8, (2, 4, 8)),
    ("mlp.experts.gate_up_proj_scales", torch.uint8, (2, 4)),
    ("self_attn.q_proj.weight_scale_inv", torch.float32, (2, 2)),
    ("self_attn.q_proj.weight_scale", torch.float32, (1,)), ("self_attn.q_proj.qweight", torch.int32, (4, 4)),
    ("self_attn.q_proj.qzeros", torch.int32, (4, 4)), ("self_attn.q_proj.g_idx", torch.int32, (4,)),
    ("self_attn.q_proj.weight.absmax", torch.float32, (4,)),
    ("self_attn.q_proj.weight.quant_state.bitsandbytes__nf4", torch.uint8, (4,)),
    ("self_attn.q_proj.SCB", torch.float32, (4,)), ("self_attn.q_proj.weight_packed", torch.int32, (4, 4)),
    ("self_attn.k_proj.weight", torch.uint8, (4, 4)), ("self_attn.k_proj.weight", torch.int8, (4, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("part", "dtype", "shape"), PACKED)
def test_equal_packed_weights_are_refused_without_a_quantization_config(
    part: str, dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    name = f"model.layers.0.{part}"
    for one in "ab":
        tensors: dict[str, Any] = {**random_tensors(0), name: torch.ones(shape, dtype=dtype)}
        save_checkpoint(tmp_path / one, tensors)
    found = [one for one in blocking(tmp_path, LINEAR) if "quantized" in one.found]
    assert {one.where for one in found} == {f"a: {name}", f"b: {name}"}
    assert all("dequantize" in one.remedy for one in found)


def test_integer_buffers_are_not_mistaken_for_packed_weights(tmp_path: Path) -> None:
    for one in "ab":
        counters = {"model.embeddings.position_ids": torch.arange(4)[None], "model.steps": torch.tensor([3])}
        save_checkpoint(tmp_path / one, {**random_tensors(0), **counters})
    assert blocking(tmp_path, LINEAR) == []


def test_layers_are_not_moved_if_their_kinds_do_not_explain_their_tensors(tmp_path: Path) -> None:
    extra = {"model.layers.1.self_attn.gate.weight": torch.ones(4)}
    for seed, one in enumerate("ab"):
        save_checkpoint(tmp_path / one, {**random_tensors(seed), **extra})
    stacked = recipe_of([("a", 0, 2), ("b", 1, 3)])
    (finding,) = blocking(tmp_path, stacked)
    assert finding.where == "a: model.layers.1.self_attn.gate.weight"
    assert blocking(tmp_path, LINEAR) == []
    assert blocking(tmp_path, recipe_of([("a", 0, 3)])) == []


def save_patterns(root: Path, first: int, second: int) -> None:
    for seed, (name, pattern) in enumerate({"a": first, "b": second}.items()):
        config = {"model_type": "gemma3_text", "sliding_window_pattern": pattern}
        save_checkpoint(root / name, random_tensors(seed), config=config)


def test_layers_of_different_kinds_are_not_merged_into_one(tmp_path: Path) -> None:
    save_patterns(tmp_path, 2, 2)
    sources = "[{model: a, layer_range: [0, 2]}, {model: b, layer_range: [1, 3]}]"
    text = f"merge_method: linear\nparameters: {{weight: 1}}\nslices: [{{sources: {sources}}}]\n"
    (finding,) = blocking(tmp_path, text)
    assert "layer_types, sliding_window_pattern" in finding.found
    assert "layer 1 of b" in finding.where


def test_whole_models_with_different_layer_kinds_are_reported(tmp_path: Path) -> None:
    save_patterns(tmp_path, 2, 3)
    (finding,) = findings(tmp_path, LINEAR)
    assert (finding.severity, finding.where) == ("warn", "b: config.json: layer_types, sliding_window_pattern")


def test_tensors_of_unknown_position_are_refused(tmp_path: Path) -> None:
    for seed, one in enumerate("ab"):
        save_checkpoint(tmp_path / one, {**random_tensors(seed), "model.mystery.weight": torch.ones(3)})
    (finding,) = blocking(tmp_path, recipe_of([("a", 0, 2), ("b", 1, 3)]))
    assert finding.where.endswith("model.mystery.weight")
    assert blocking(tmp_path, recipe_of([("a", 0, 2), ("a", 1, 3)])) == []

"""Slices renumber layers and adjust the config, and modules merge parts of a network in their own way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from family import LAYERS, LINEAR, load, merge_text, random_tensors, save_checkpoint
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput

STACK = """
merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 2]}]
  - sources: [{model: b, layer_range: [1, 3]}]
"""


def test_gradients_span_each_slice_or_all_layers_and_other_tensors_get_the_first_value(family: Path) -> None:
    first, last = "parameters: {weight: [1, 0]}", "parameters: {weight: [0, 1]}"
    cut = f"{{model: a, layer_range: [0, 3], {first}}}, {{model: b, layer_range: [0, 3], {last}}}"
    merge_text(f"merge_method: linear\nslices: [{{sources: [{cut}]}}]\n", family)
    merge_text(f"merge_method: linear\nmodels: [{{model: a, {first}}}, {{model: b, {last}}}]", family, "whole")
    a, b, out, whole = (load(family / name) for name in ("a", "b", "out", "whole"))
    norm, up = "model.layers.{}.input_layernorm.weight", "model.layers.2.mlp.up_proj.weight"
    for layer, share in enumerate([0.0, 0.5, 1.0]):
        expected = (1 - share) * a[norm.format(layer)] + share * b[norm.format(layer)]
        np.testing.assert_allclose(out[norm.format(layer)], expected, rtol=1e-6)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert np.array_equal(out[name], a[name])
    assert np.array_equal(whole[up], b[up])


def test_a_layer_that_does_not_exist_is_refused(family: Path) -> None:
    with pytest.raises(InvalidInput, match="at most 3 layers"):
        merge_text(STACK.replace("[1, 3]", "[2, 4]"), family)


def test_a_scale_with_a_filter_only_affects_matching_tensors(family: Path) -> None:
    merge_text(STACK + "parameters: {scale: [{filter: q_proj, value: 0.5}, {value: 1}]}\n", family)
    a, out = load(family / "a"), load(family / "out")
    q, up = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(out[q], 0.5 * a[q])
    assert np.array_equal(out[up], a[up])


def test_dependent_documents_equal_separate_merges(family: Path) -> None:
    first = "merge_method: slerp\nbase_model: base\nmodels: [{model: a}]\nparameters: {t: 0.4}\ndtype: bfloat16\n"
    second = LINEAR.replace("model: a", "model: first")
    together = merge_text(f"{second}---\nname: first\n{first}", family, "together")
    merge_text(first, family, "first")
    alone = merge_text(second, family, "alone")
    assert together.files == alone.files
    assert together.bytes_written > alone.bytes_written
    assert {path.name for path in (family / "together").iterdir()} == set(alone.files)


@pytest.mark.story
@settings(max_examples=10, deadline=None)
@given(
    cuts=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, LAYERS), st.integers(0, LAYERS)), min_size=1, max_size=5
    )
)
def test_an_empty_slice_provides_only_embeddings_or_norm_and_head(
    cuts: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("slices")
    cuts = [(model, min(ends), max(ends)) for model, *ends in cuts]
    assume(any(start < end for _, start, end in cuts))
    parents = {name: random_tensors(seed) for seed, name in enumerate("ab")}
    for name, tensors in parents.items():
        save_checkpoint(root / name, tensors)
    lines = "".join(f"- sources: [{{model: {model}, layer_range: [{start}, {end}]}}]\n" for model, start, end in cuts)
    merge_text(f"merge_method: passthrough\nslices:\n{lines}", root)
    out = load(root / "out")
    origins = [(model, layer) for model, start, end in cuts for layer in range(start, end)]
    part = "model.layers.{}.input_layernorm.weight"
    assert sum("input_layernorm" in name for name in out) == len(origins)
    for layer, (model, number) in enumerate(origins):
        assert np.array_equal(out[part.format(layer)], parents[model][part.format(number)])
    assert np.array_equal(out["model.embed_tokens.weight"], parents[cuts[0][0]]["model.embed_tokens.weight"])
    for name in ("model.norm.weight", "lm_head.weight"):
        assert np.array_equal(out[name], parents[cuts[-1][0]][name])
    assert json.loads((root / "out/config.json").read_text())["num_hidden_layers"] == len(origins)


def test_an_empty_slice_of_several_models_merges_tensors_outside_the_layers(family: Path) -> None:
    both = "[{model: a, layer_range: [0, 0], parameters: {weight: 1}}, {model: b, layer_range: [2, 2]}]"
    merge_text(
        f"merge_method: linear\nparameters: {{weight: 3}}\nslices:\n- sources: {both}\n"
        "- sources: [{model: b, layer_range: [0, 3]}]\n",
        family,
    )
    a, b, out = load(family / "a"), load(family / "b"), load(family / "out")
    name = "model.embed_tokens.weight"
    np.testing.assert_allclose(out[name], 0.25 * a[name] + 0.75 * b[name], rtol=1e-6, atol=1e-7)
    assert np.array_equal(out["lm_head.weight"], b["lm_head.weight"])


MODULES = """
merge_method: linear
base_model: a
modules:
  text_decoder:
    models: [{model: a, parameters: {weight: [1, 0]}}, {model: b, parameters: {weight: [0, 1]}}]
  vision_tower:
    models: [{model: a}, {model: b}]
    parameters: {weight: 1}
"""


def save_random(directory: Path, seed: int, names: list[str], layers: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(4, 4, generator=generator) for name in names}
    config = {"num_hidden_layers": layers, "tie_word_embeddings": False}
    save_checkpoint(directory, {"model.embed_tokens.weight": torch.zeros(4, 4), **tensors}, config=config)


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    """Checkpoints with text and vision layers."""
    names = ["model.language_model.embed_tokens.weight", "lm_head.weight", "model.visual.merger.weight"]
    names += [f"model.language_model.layers.{n}.mlp.weight" for n in range(3)]
    names += [f"model.visual.blocks.{n}.mlp.weight" for n in range(2)]
    for seed, model in enumerate("ab"):
        save_random(tmp_path / model, seed, names, 3)
    return tmp_path


def test_each_part_has_its_own_models_and_gradients(seeing: Path) -> None:
    merge_text(MODULES, seeing)
    a, b, out = (load(seeing / name) for name in ("a", "b", "out"))
    text, vision = "model.language_model.layers.{}.mlp.weight", "model.visual.blocks.{}.mlp.weight"
    assert np.array_equal(out[text.format(2)], b[text.format(2)])
    assert np.array_equal(out["lm_head.weight"], a["lm_head.weight"])
    for name in (vision.format(0), vision.format(1), "model.visual.merger.weight"):
        np.testing.assert_allclose(out[name], (a[name] + b[name]) / 2, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MODULES.replace("vision_tower", "visuall"), "did you mean 'visual'"),
        (MODULES.split("  vision_tower")[0], r"no module contains model\.visual\.blocks"),
    ],
)
def test_a_part_that_does_not_exist_or_that_no_module_covers_is_refused(seeing: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        merge_text(text, seeing)


@pytest.mark.parametrize("first_is_alias", [True, False])
@pytest.mark.parametrize(
    ("first", "second"),
    [("text_decoder", other) for other in ("text", "language_model")]
    + [("vision_tower", "visual"), ("vision", "vision_tower")],
)
def test_a_part_that_two_modules_select_is_refused(seeing: Path, first: str, second: str, first_is_alias: bool) -> None:
    names = [first, second] if first_is_alias else [second, first]
    names.append("visual" if first.startswith("text") else "text_decoder")
    modules = "".join(f"  {name}:\n    models: [{{model: a}}, {{model: b}}]\n" for name in names)
    text = f"merge_method: linear\nbase_model: a\nmodules:\n{modules}parameters: {{weight: 1}}\n"
    with pytest.raises(InvalidInput, match=f"which the module {names[0]} already selects") as caught:
        merge_text(text, seeing)
    assert caught.value.where.endswith(f"modules.{names[1]}")
    assert caught.value.expected
    assert caught.value.remedy


def test_the_only_part_of_a_plain_language_model_is_called_default(tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", *(f"model.layers.{n}.mlp.weight" for n in range(2))]
    for seed, model in enumerate("ab"):
        save_random(tmp_path / model, seed, names, 2)
    models = "models: [{model: a, parameters: {weight: 0.3}}, {model: b, parameters: {weight: 0.7}}]"
    merge_text(f"merge_method: linear\n{models}", tmp_path, "plain")
    merge_text(f"merge_method: linear\nmodules:\n  default:\n    {models}", tmp_path, "module")
    plain, module = load(tmp_path / "plain"), load(tmp_path / "module")
    assert plain.keys() == module.keys()
    assert all(np.array_equal(plain[name], module[name]) for name in plain)

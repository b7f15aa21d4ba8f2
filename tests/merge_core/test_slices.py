"""Slices renumber layers, restart gradients and adjust the config."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from family import LAYERS, load, merge_text, random_tensors, save_checkpoint
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput

STACK = """
merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 2]}]
  - sources: [{model: b, layer_range: [1, 3]}]
"""


def test_layers_are_stacked_with_embeddings_of_the_first_and_head_of_the_last(family: Path) -> None:
    merge_text(STACK, family)
    a, b, out = load(family / "a"), load(family / "b"), load(family / "out")
    up = "model.layers.{}.mlp.up_proj.weight"
    for layer, (source, number) in enumerate([(a, 0), (a, 1), (b, 1), (b, 2)]):
        assert np.array_equal(out[up.format(layer)], source[up.format(number)])
    assert np.array_equal(out["model.embed_tokens.weight"], a["model.embed_tokens.weight"])
    assert np.array_equal(out["lm_head.weight"], b["lm_head.weight"])
    assert json.loads((family / "out/config.json").read_text())["num_hidden_layers"] == 4


def test_gradients_span_each_slice_and_other_tensors_get_the_first_value(family: Path) -> None:
    merge_text(
        "merge_method: linear\nslices:\n"
        "  - sources: [{model: a, layer_range: [0, 3], parameters: {weight: [1, 0]}},"
        " {model: b, layer_range: [0, 3], parameters: {weight: [0, 1]}}]\n",
        family,
    )
    a, b, out = load(family / "a"), load(family / "b"), load(family / "out")
    norm = "model.layers.{}.input_layernorm.weight"
    for layer, share in enumerate([0.0, 0.5, 1.0]):
        expected = (1 - share) * a[norm.format(layer)] + share * b[norm.format(layer)]
        np.testing.assert_allclose(out[norm.format(layer)], expected, rtol=1e-6)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert np.array_equal(out[name], a[name])


def test_gradients_span_all_layers_of_whole_models(family: Path) -> None:
    merge_text(
        "merge_method: linear\n"
        "models: [{model: a, parameters: {weight: [1, 0]}}, {model: b, parameters: {weight: [0, 1]}}]",
        family,
    )
    assert np.array_equal(
        load(family / "out")["model.layers.2.mlp.up_proj.weight"],
        load(family / "b")["model.layers.2.mlp.up_proj.weight"],
    )


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
    second = "merge_method: linear\nmodels: [{model: first}, {model: b}]\nparameters: {weight: 1}\n"
    together = merge_text(f"{second}---\nname: first\n{first}", family, "together")
    merge_text(first, family, "first")
    alone = merge_text(second, family, "alone")
    assert together.files == alone.files
    assert together.bytes_written > alone.bytes_written
    assert {path.name for path in (family / "together").iterdir()} == set(alone.files)


@pytest.mark.story
@settings(max_examples=25, deadline=None)
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

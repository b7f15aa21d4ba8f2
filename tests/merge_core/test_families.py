"""For every family and any cut, slices match the stack of layers in memory or are refused by name.

The oracles are transformers with its own modules rearranged (``in_memory.py``), and its reading of a configuration.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from family import save_checkpoint
from family_table import DONE, merge_or_refuse, parents_of, recipe_of, row_of, rows, tried
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_memory import stack
from safetensors.torch import load_file
from samples import sampled
from tiny_families import BY_NAME, FAMILIES, LAYERS, container, container_types, load, logits
from transformers import AutoConfig

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.architecture import (
    LayerOrigin,
    described_families,
    positions_outside_layers,
    stacked_config,
    text_part,
)
from mergegate.merge_core.errors import InvalidInput

# One family for each way in which a layer's index can matter.
SAMPLE = ("gemma3, unlisted", "llama4, unlisted", "nemotron_h", "jamba")
# Containers whose configuration has a key that may affect single layers, or cannot express the kinds of all cuts.
REFUSED_KEYS = {
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), ("insert_layer_id",)),
    "kimi_k25": ("first_k_dense_replace, moe_layer_freq",),
}
EVERY_CELL = [pytest.param(name, marks=pytest.mark.story if name in SAMPLE else pytest.mark.proof) for name in BY_NAME]


@pytest.mark.parametrize("name", EVERY_CELL)
def test_the_family_table_matches_the_measured_results(name: str, tmp_path: Path) -> None:
    assert row_of(BY_NAME[name], tmp_path) == rows()[name]


def test_the_family_table_has_a_row_for_every_tested_family() -> None:
    assert list(rows()) == [family.name for family in FAMILIES]
    assert {len(row) for row in rows().values()} == {5}
    assert all(cell for row in rows().values() for cell in row)


def test_every_described_family_is_tested_or_refused() -> None:
    tried_types = {family.model_type for family in FAMILIES}
    parts = {"qwen2_vl_text", "qwen2_5_vl_text"}  # Tried within the networks that contain them.
    untried = {
        name
        for family in described_families()
        for name in family.model_types
        if family.refused is None and name not in tried_types | parts
    }
    assert untried == set()
    assert all(family.source for family in described_families())


SETTINGS = st.fixed_dictionaries({"depth": st.integers(2, 12), "first": st.integers(0, 4), "period": st.integers(1, 5)})
PICKS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), min_size=1, max_size=4)


def origins(config: dict[str, Any], depth: int, picks: list[tuple[int, int]]) -> list[tuple[LayerOrigin, ...]]:
    """Return the origins of a stack of slices ``(start, count)`` of one model, cut off at its depth."""
    numbers = [index for start, count in picks for index in range(start % depth, min(depth, start % depth + count))]
    return [(LayerOrigin("a", config, index, depth),) for index in numbers]


def stack_again(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the first three of six layers, followed by the last four."""
    return stacked_config(config, origins(config, 6, [(0, 3), (2, 4)]), "slices")


def of_the_library(config: dict[str, Any], index: int) -> tuple[Any, ...]:
    """Return transformers' settings of layer ``index``, read by its own code for each family."""
    read: Any = AutoConfig.for_model(**config)
    found: list[Any] = []
    for key in ("layer_types", "layers_block_type", "no_rope_layers", "layers_num_experts", "mlp_layer_types"):
        value = getattr(read, key, None)
        if isinstance(value, (list, tuple)):
            found.append(value[index])
    if config["model_type"] == "llama4_text":
        found.append(index in read.moe_layers)
    if config["model_type"] in ("deepseek_v3", "glm4_moe", "deepseek_v2", "dots1"):
        found.append(index >= read.first_k_dense_replace)
    if config["model_type"] == "lfm2_moe":
        found.append(index >= read.num_dense_layers)
    if config["model_type"] in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        sparse = read.num_experts > 0 and (index + 1) % read.decoder_sparse_step == 0
        found.append(index not in read.mlp_only_layers and sparse)
    return tuple(found)


def written(kind: str, values: dict[str, int]) -> dict[str, Any]:
    depth, first, period = values["depth"], values["first"], values["period"]
    periods = ["sliding_window_pattern", "full_attention_interval", "decoder_sparse_step", "no_rope_layer_interval"]
    keys: dict[str, Any] = dict.fromkeys([*periods, "interleave_moe_layer_step"], period)
    keys |= {"attn_layer_period": period, "attn_layer_offset": first % period}
    keys |= {"expert_layer_period": period + 1, "expert_layer_offset": first % (period + 1)}
    keys |= {"first_k_dense_replace": first, "num_dense_layers": first, "mlp_only_layers": [first, first + period]}
    keys |= {"max_window_layers": first, "use_sliding_window": True, "sliding_window": 4}
    keys |= {"full_attn_idxs": [first], "attn_layer_indices": [first], "layer_types": None}
    if kind == "lfm2_moe":
        keys["layer_types"] = ["conv", "full_attention"] * (depth // 2) + ["conv"] * (depth % 2)
    owned = {key for family in described_families() if kind in family.model_types for key in family.keys}
    return {"model_type": kind, "num_hidden_layers": depth, **{key: keys[key] for key in keys if key in owned}}


def stacked_or_named(config: dict[str, Any], layers: list[Any], keys: list[str]) -> dict[str, Any] | None:
    """Return the result's configuration, or None if it is refused because of one of ``keys``."""
    try:
        return stacked_config(config, layers, "slices")
    except InvalidInput as error:
        refusal = error
    assert any(key in refusal.where for key in keys)
    return None


KINDS = (
    "gemma2 gemma3_text cohere2 olmo3 gpt_oss qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5_text deepseek_v3"
    " deepseek_v2 glm4_moe dots1 llama4_text smollm3 exaone4 jamba bamba lfm2 lfm2_moe granitemoehybrid vaultgemma"
)


@pytest.mark.parametrize("kind", sampled(KINDS.split(), KINDS.split()[::8]))
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(values=SETTINGS, picks=PICKS)
def test_transformers_reads_the_same_layer_kinds_from_the_result_as_from_the_parents(
    kind: str, values: dict[str, int], picks: list[tuple[int, int]]
) -> None:
    config = written(kind, values)
    layers = origins(config, values["depth"], picks)
    before = json.dumps(config)
    owned = [key for family in described_families() if kind in family.model_types for key in family.keys]
    result = stacked_or_named(config, layers, owned)
    if result is None:
        return
    assert json.dumps(config) == before
    assert result["num_hidden_layers"] == len(layers)
    for number, (origin,) in enumerate(layers):
        assert of_the_library(result, number) == of_the_library(config, origin.index)


def test_layer_kinds_that_a_list_can_express_are_never_refused() -> None:
    for kind in ("gemma3_text", "qwen3_next", "llama4_text", "qwen2_moe", "bamba", "lfm2"):
        config = written(kind, {"depth": 6, "first": 1, "period": 2})
        layers = origins(config, 6, [(3, 2), (0, 6), (5, 1), (1, 4)])
        assert stacked_config(config, layers, "slices")["num_hidden_layers"] == len(layers)


def test_periods_and_counts_of_first_layers_are_adapted_if_possible() -> None:
    jamba = written("jamba", {"depth": 8, "first": 1, "period": 2}) | {
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
    }
    assert stacked_config(jamba, origins(jamba, 8, [(0, 4), (2, 6)]), "slices")["attn_layer_period"] == 2
    shifted = stacked_config(jamba, origins(jamba, 8, [(1, 6)]), "slices")
    assert (shifted["attn_layer_period"], shifted["attn_layer_offset"]) == (2, 0)
    deepseek = written("deepseek_v3", {"depth": 8, "first": 3, "period": 1})
    assert stacked_config(deepseek, origins(deepseek, 8, [(1, 7)]), "slices")["first_k_dense_replace"] == 2
    with pytest.raises(InvalidInput, match="first_k_dense_replace"):
        stacked_config(deepseek, origins(deepseek, 8, [(0, 6), (0, 6)]), "slices")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_pattern", "LLG"), ("dense_every_n", 3), ("ffn_multipliers", [1, 2, 3, 4, 5, 6]),
        ("block_configs", [{"heads": 1}] * 6), ("skip_layer_ids", [2]), ("layer_types", ["full_attention"] * 6),
    ],
)  # fmt: skip
def test_an_undescribed_key_that_may_affect_single_layers_is_refused(key: str, value: Any) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 6, key: value}
    with pytest.raises(InvalidInput, match=key):
        stack_again(config)


@pytest.mark.parametrize(
    "harmless",
    [
        {"rms_norm_eps": 1e-6, "eos_token_id": [1, 2, 3, 4, 5, 6], "architectures": ["LlamaForCausalLM"]},
        {"vision_feature_layer": -2, "layer_norm_eps": 1e-5, "layerdrop": 0.1, "initializer_range": 0.02},
        {"max_window_layers": 28, "use_sliding_window": False, "attention_chunk_size": 8},
        {"attention_period": 1, "moe_layers": [], "sliding_window_pattern": None, "rope_scaling": {"factor": 2}},
    ],
)
def test_harmless_keys_with_similar_names_are_accepted(harmless: dict[str, Any]) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 6, **harmless}
    assert stack_again(config)["num_hidden_layers"] == 7


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": "six"}, "sliding_window_pattern"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma3_text", "layer_types": 7}, "layer_types"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": ["first"]}, "mlp_only_layers"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"model_type": "lfm2_moe"}, "layer_types"),
        ({"model_type": "nemotron_h"}, "layers_block_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({}, "model_type"),
        ({"model_type": "llava", "text_config": {"model_type": "unheard-of"}}, "model_type"),
    ],
)
def test_an_invalid_configuration_is_refused_without_a_traceback(config: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidInput, match=where):
        stack_again(config)


@pytest.mark.parametrize(
    ("container", "inner", "part"),
    [
        ("internvl", "qwen2", "llm_config"),
        ("internvl", "qwen2", "language_config"),
        ("internvl_chat", "qwen2", "text_config"),
        ("unheard-of", "lfm2", "text_config"),
    ],
)
def test_a_container_that_transformers_lacks_is_reported_instead_of_its_text_model(
    container: str, inner: str, part: str
) -> None:
    text = {"model_type": inner, "num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    config = {"model_type": container, part: text, "vision_config": {"model_type": "siglip2_vision_model"}}
    with pytest.raises(InvalidInput) as refused:
        stack_again(config)
    assert refused.value.where.endswith("config.json: model_type")
    assert repr(container) in refused.value.found
    assert repr(inner) not in refused.value.found


@pytest.mark.parametrize(
    ("container", "text", "more", "words"),
    [
        ("internvl", "qwen2", {"text_layer_indices": [1, 3]}, "text_layer_indices"),
        ("llava_onevision", "qwen2", {"text_layer_indices": [1, 3]}, "text_layer_indices"),
        ("llava", "unheard-of", {}, r"text_config\.model_type: 'unheard-of'"),
    ],
)
def test_a_key_for_single_layers_or_an_undescribed_text_model_in_a_container_is_refused(
    container: str, text: str, more: dict[str, Any], words: str
) -> None:
    config = {"model_type": container, "text_config": {"model_type": text, "num_hidden_layers": 6}, **more}
    with pytest.raises(InvalidInput, match=words):
        stack_again(config)


@pytest.mark.story
@pytest.mark.parametrize("name", sampled(container_types(), ("internvl", "lfm2_vl", "qianfan_ocr"), pytest.mark.proof))
def test_containers_slice_their_described_text_family(name: str, tmp_path: Path) -> None:
    family = container(name)
    found = tried(family, parents_of(family, tmp_path), tmp_path)
    assert found.pop("whole") == DONE
    text = text_part(family.config().to_dict()).family
    assert text is not None
    keys = {text.refused[0]} if text.refused else {DONE, *REFUSED_KEYS.get(name, ())}
    assert set(found.values()) <= keys


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("tower", ["vision_model.encoder.layers", "model.vision_tower.layers"])
def test_the_ends_of_a_text_network_are_found_however_deep_its_layers_are(
    depth: int, tower: str, tmp_path: Path
) -> None:
    stack = ".".join(["language_model", "model", "encoder", "text"][:depth]) + ".layers"
    for end in range(1, depth + 1):  # The part that contains the embedding and the norm.
        part = ".".join(stack.split(".")[:end])
        sides = {
            f"{part}.embed_tokens.weight": "before",
            f"{part}.norm.weight": "after",
            f"{tower.removesuffix('.layers')}.norm.weight": "beside",
            "mlp1.norm.weight": "beside",
        }
        names = [*sides, f"{stack}.0.mlp.up_proj.weight", f"{tower}.0.mlp.up_proj.weight"]
        tensors = {name: torch.zeros(2, 2) for name in names}
        save_checkpoint(tmp_path / str(end), {**tensors, "model.embed_tokens.weight": torch.zeros(2, 2)})
        assert positions_outside_layers(sides, stack, open_checkpoint(tmp_path / str(end))) == sides, part


@pytest.mark.parametrize("family", ["smollm3", "llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("window", [{}, {"use_sliding_window": False}, {"use_sliding_window": True}, "on"])
def test_a_number_that_only_another_family_reads_is_harmless(family: str, window: Any) -> None:
    flags = {"use_sliding_window": True, "sliding_window": 4} if window == "on" else window
    config = {"model_type": family, "num_hidden_layers": 6, "max_window_layers": 28, **flags}
    result = stack_again(config)
    assert (result["num_hidden_layers"], result["max_window_layers"]) == (7, 28)
    if family == "smollm3":  # The layers that transformers builds do not depend on this key.
        read = [AutoConfig.for_model(**{**result, "max_window_layers": number}) for number in (0, 28)]
        assert read[0].layer_types == read[1].layer_types


def test_layers_of_parents_with_different_patterns_keep_their_kinds() -> None:
    second, third = ({"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window_pattern": n} for n in (2, 3))
    layers = [(LayerOrigin("a", second, index, 6),) for index in range(3)]
    layers += [(LayerOrigin("b", third, index, 6),) for index in range(3, 6)]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert stacked_config(second, layers, "slices")["layer_types"] == [*kinds, *kinds[::2], "full_attention"]


def test_a_period_can_express_that_no_layer_has_a_kind() -> None:
    config = {"model_type": "jamba", "num_hidden_layers": 8, "expert_layer_period": 1, "expert_layer_offset": 0}
    result = stacked_config(config, origins(config, 8, [(5, 3), (5, 3)]), "slices")
    assert AutoConfig.for_model(**result).layers_block_type == ["mamba"] * 6


@pytest.mark.parametrize("family", ["llama", "unheard-of", "zamba2"])
@pytest.mark.parametrize("picks", [[(0, 6)], [(0, 3), (3, 3)]])
def test_layers_that_keep_their_numbers_need_no_description(family: str, picks: list[tuple[int, int]]) -> None:
    config = {"model_type": family, "num_hidden_layers": 6, "hybrid_layer_ids": [1], "secret_pattern": "LLG"}
    assert stacked_config(config, origins(config, 6, picks), "slices") == config


def test_undescribed_layers_need_a_donor_of_the_same_depth() -> None:
    config = {"model_type": "unheard-of", "num_hidden_layers": 6}
    with pytest.raises(InvalidInput, match="model_type"):
        stacked_config({**config, "num_hidden_layers": 4}, origins(config, 6, [(0, 6)]), "slices")


def test_lists_of_layer_numbers_follow_the_list_of_kinds() -> None:
    kinds = ["conv", "full_attention", "conv", "conv", "full_attention", "conv"]
    config = {"model_type": "lfm2", "num_hidden_layers": 6, "layer_types": kinds, "full_attn_idxs": [1, 4]}
    result = stacked_config(config, origins(config, 6, [(0, 5), (1, 5)]), "slices")
    assert result["full_attn_idxs"] == [1, 4, 5, 8]
    assert result["layer_types"] == kinds[:5] + kinds[1:]


def test_a_missing_depth_of_the_text_part_is_written() -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    assert stacked_config(config, origins(config, 32, [(0, 6), (2, 6)]), "slices")["text_config"] == {
        "model_type": "llama",
        "num_hidden_layers": 12,
    }


# Slices as (model, first layer, number of layers).
CUT = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, LAYERS - 1), st.integers(1, LAYERS)), min_size=1, max_size=3
)


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """A cache of two checkpoints per family with their loaded models, filled on first use."""
    return {}


def pair(name: str, known: dict[str, tuple[Path, dict[str, Any]]], factory: pytest.TempPathFactory) -> Any:
    if name not in known:
        root = factory.mktemp("family")
        known[name] = root, parents_of(BY_NAME[name], root)
    return known[name]


def check_any_cut(name: str, root: Path, models: dict[str, Any], picks: list[tuple[str, int, int]]) -> None:
    family = BY_NAME[name]
    cut = [(model, start, min(LAYERS, start + count)) for model, start, count in picks]
    with TemporaryDirectory(dir=root) as place:
        for one in "ab":
            (Path(place) / one).symlink_to(root / one)
        if merge_or_refuse(recipe_of(cut), Path(place), "out") is not None:
            return
        chosen = [(models[model], index) for model, start, end in cut for index in range(start, end)]
        expected = logits(family, stack(chosen, LAYERS))
        assert torch.equal(logits(family, load(family, Path(place) / "out")), expected)


# Families whose layers alternate in computation, in tensors, or in both.
CUT_ANYWHERE = ["gemma3, unlisted", "qwen3_next, unlisted", "jamba", "llama4, unlisted", "deepseek_v3", "nemotron_h"]


@pytest.mark.story
@pytest.mark.parametrize("name", sampled(CUT_ANYWHERE, CUT_ANYWHERE[:4:2], pytest.mark.proof))
def test_slices_equal_the_stacked_layers_or_are_refused(
    name: str, parents: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, models = pair(name, parents, tmp_path_factory)

    @settings(max_examples=8 if name.startswith("gemma3") else 20, suppress_health_check=list(HealthCheck))
    @given(picks=CUT)
    def check(picks: list[tuple[str, int, int]]) -> None:
        check_any_cut(name, root, models, picks)

    check()


@pytest.mark.story
def test_image_parts_come_unchanged_from_one_parent(
    parents: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    root, _ = pair("gemma3, vision", parents, tmp_path_factory)
    for one in "ab":
        (tmp_path / one).symlink_to(root / one)
    assert merge_or_refuse(recipe_of([("a", 0, 3), ("b", 1, 4)]), tmp_path, "out") is None
    a, b, out = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b", "out"))
    beside = [name for name in a if "vision_tower" in name or "projector" in name]
    assert len(beside) > 10
    assert all(torch.equal(out[name], a[name]) for name in beside)
    assert not any(torch.equal(a[name], b[name]) for name in beside)
    # The text parts come from both parents: the embeddings from the first, the norm from the last.
    (norm,) = [name for name in a if name.endswith(("language_model.model.norm.weight", "language_model.norm.weight"))]
    assert torch.equal(out[norm], b[norm])
    (embedding,) = [name for name in a if "embed_tokens" in name]
    assert torch.equal(out[embedding], a[embedding])

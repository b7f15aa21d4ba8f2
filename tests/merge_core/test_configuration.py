"""The config.json keys that mergegate interprets are type-checked for every parent when its checkpoint is opened."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from family import random_tensors, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sampled
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.architecture import described_families
from mergegate.merge_core.architecture.structure import LAYER_COUNT_KEYS
from mergegate.merge_core.checkpoint import CONFIG_KEYS, TEXT_PARTS, read_config
from mergegate.merge_core.errors import InvalidInput

WHOLE = st.integers(1, 8)
VALUES = {
    "string": st.text(max_size=4), "number": st.floats(0.25, 0.75), "whole number": WHOLE, "flag": st.booleans(),
    "null": st.none(), "list of texts": st.lists(st.sampled_from(["full_attention", "conv"]), min_size=1, max_size=3),
    "list of numbers": st.lists(WHOLE, min_size=1, max_size=3), "list of objects": st.just([{}]),
    "object": st.just({"a": 1}),
}  # fmt: skip
# One key of each type, with the kinds of values that it allows.
EXAMPLES: dict[str, set[str]] = {
    **{key: {"whole number"} for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")},
    "model_type": {"string"},
    **{key: {"whole number", "null"} for key in ("vocab_size", "num_experts", "sliding_window")},
    "rope_theta": {"whole number", "number", "null"}, "tie_word_embeddings": {"flag", "null"},
    "hidden_act": {"string", "null"}, **{key: {"list of texts", "null"} for key in ("architectures", "layer_types")},
    "full_attn_idxs": {"list of numbers", "null"},
    **{key: {"object", "null"} for key in ("text_config", "rope_scaling")}, "torch_dtype": {"string", "object", "null"},
    "sliding_window_pattern": {"whole number", "string", "null"},
    **{key: {"whole number", "list of numbers", "null"} for key in ("eos_token_id", "moe_layer_freq")},
}  # fmt: skip


def allowed(key: str) -> set[str]:
    """Return the kinds of values that a key allows, which are those of the example with the same type."""
    kind = CONFIG_KEYS[key]
    return next(kinds for example, kinds in EXAMPLES.items() if CONFIG_KEYS[example] == kind)


def opened(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory / "config.json")


@pytest.mark.parametrize("key", sampled(CONFIG_KEYS, EXAMPLES))
@settings(max_examples=6)
@given(st.data())
def test_a_value_of_a_wrong_type_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, key: str, data: st.DataObject
) -> None:
    directory = tmp_path_factory.getbasetemp() / "typed"
    kinds = allowed(key)
    kind = data.draw(st.sampled_from(sorted(VALUES.keys() - kinds)))
    value = data.draw(VALUES[kind])
    part = data.draw(st.sampled_from(["", *TEXT_PARTS]))
    with pytest.raises(InvalidInput) as refused:
        opened(directory, {part: {key: value}} if part else {key: value})
    where = f"{part}.{key}" if part else key
    assert refused.value.where == f"{directory / 'config.json'}: {where}"
    assert refused.value.expected
    assert refused.value.remedy
    good = data.draw(VALUES[data.draw(st.sampled_from(sorted(kinds)))])
    assert opened(directory, {key: good}) == {key: good}


@pytest.mark.parametrize(
    ("rope", "where"),
    [
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"type": 3}, "type"),
        ({"rope_type": "linear", "factor": [2]}, "factor"),
        ({"full_attention": {"rope_theta": True}}, "full_attention.rope_theta"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_parameters_of_positions_are_typed(tmp_path: Path, key: str, rope: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidInput, match=rf"config\.json: {key}\.{where}:"):
        opened(tmp_path, {key: rope})


def test_every_key_that_decides_about_layers_is_typed() -> None:
    described = {
        key
        for family in described_families()
        for key in (*family.prediction_keys, *family.depth_of, *(key for kind in family.kinds for key in kind.keys))
    }
    assert described | set(LAYER_COUNT_KEYS) <= CONFIG_KEYS.keys()


CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.story
@pytest.mark.parametrize(
    "kinds", [CAUSAL, pytest.param(sorted(CONFIG_MAPPING), marks=pytest.mark.proof)], ids=["causal", "all"]
)
def test_every_configuration_that_transformers_writes_is_accepted(tmp_path: Path, kinds: Collection[str]) -> None:
    tried = 0
    for kind in kinds:
        try:
            config = CONFIG_MAPPING[kind]()
            texts = [config.to_json_string(use_diff=use_diff) for use_diff in (True, False)]
        except Exception:  # The class has no defaults.
            continue
        tried += 1
        for text in texts:
            assert opened(tmp_path, json.loads(text)) == json.loads(text)
    assert tried >= len(kinds) - 3


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", "3"), ("num_hidden_layers", True), ("hidden_size", [96]), ("text_config", [1])],
)
def test_every_parent_is_checked(tmp_path: Path, position: int, key: str, value: Any) -> None:
    for number in range(3):
        config = {key: value} if number == position else {}
        save_checkpoint(tmp_path / str(number), random_tensors(number), config=config)
        if number != position:
            open_checkpoint(tmp_path / str(number))
    with pytest.raises(InvalidInput, match=rf"{position}/config\.json: {key}"):
        open_checkpoint(tmp_path / str(position))

"""Read ``config.json`` and check the JSON type of every key that mergegate interprets.

The check runs when a checkpoint is opened, so that all other code can rely on the types. Keys that are not listed here
are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Keys of ``config.json`` under which multimodal families store the configuration of their language model."""


def config_parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return ``config``, followed by the language model configurations inside it (see ``TEXT_PARTS``)."""
    return [config, *(config[key] for key in TEXT_PARTS if isinstance(config.get(key), Mapping))]


@dataclass(frozen=True)
class KeyType:
    """JSON type of a key in ``config.json``.

    ``expected`` describes the type in error messages, and ``accepts`` returns whether a value has it. If ``nullable``,
    null is also allowed, and selects the default of the model family.
    """

    expected: str
    accepts: Callable[[Any], bool]
    nullable: bool = True


def _whole_from(least: int | None) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and (least is None or value >= least)


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(item) is kind for item in value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


_SIZE = KeyType("a whole number, at least 1", _whole_from(1))
_COUNT = KeyType("a whole number, at least 0", _whole_from(0))
_INTEGER = KeyType("a whole number", _whole_from(None))
_NUMBER = KeyType("a number", lambda value: type(value) in (int, float))
_FLAG = KeyType("true or false", lambda value: isinstance(value, bool))
_TEXT = KeyType("a string", _text)
_TEXTS = KeyType("a list of strings", _list_of(str))
_NUMBERS = KeyType("a list of whole numbers", _list_of(int))
_OBJECT = KeyType("an object", lambda value: isinstance(value, dict))

_KEYS_OF_TYPE: tuple[tuple[KeyType, str], ...] = (
    (KeyType(_SIZE.expected, _SIZE.accepts, nullable=False), "hidden_size num_attention_heads"),
    (KeyType(_COUNT.expected, _COUNT.accepts, nullable=False), "num_hidden_layers"),
    (KeyType(_TEXT.expected, _TEXT.accepts, nullable=False), "model_type"),
    (
        _SIZE,
        "vocab_size intermediate_size moe_intermediate_size num_key_value_heads n_embd n_head n_inner "
        "attn_layer_period decoder_sparse_step expert_layer_period full_attention_interval "
        "interleave_moe_layer_step no_rope_layer_interval",
    ),
    (
        _COUNT,
        "n_layer n_layers num_layers head_dim num_experts num_local_experts n_routed_experts num_experts_per_tok "
        "n_group max_window_layers first_k_dense_replace num_dense_layers attn_layer_offset expert_layer_offset "
        "num_nextn_predict_layers num_mtp_layers original_max_position_embeddings",
    ),
    (_INTEGER, "sliding_window"),
    (_NUMBER, "rope_theta partial_rotary_factor rms_norm_eps layer_norm_eps max_position_embeddings"),
    (
        _FLAG,
        "tie_word_embeddings use_sliding_window attention_bias mlp_bias norm_topk_prob scale_attn_by_inverse_layer_idx",
    ),
    (_TEXT, "hidden_act hidden_activation activation_function hybrid_override_pattern"),
    (_TEXTS, "architectures layer_types layers_block_type"),
    (_NUMBERS, "no_rope_layers full_attn_idxs attn_layer_indices mlp_only_layers moe_layers"),
    (_OBJECT, "text_config llm_config language_config rope_scaling rope_parameters quantization_config auto_map"),
    (KeyType("the name of a number format", lambda value: isinstance(value, (str, dict))), "dtype torch_dtype"),
    (
        KeyType("a token id or a list of token ids", lambda value: _whole_from(None)(value) or _NUMBERS.accepts(value)),
        "bos_token_id eos_token_id pad_token_id",
    ),
    (
        KeyType(
            "a whole number, at least 1, or a string with one letter per layer",
            lambda value: _SIZE.accepts(value) or _text(value),
        ),
        "sliding_window_pattern",
    ),
    (
        KeyType(
            "a whole number, at least 1, or a list with one number per layer",
            lambda value: _SIZE.accepts(value) or _NUMBERS.accepts(value),
        ),
        "moe_layer_freq",
    ),
)
CONFIG_KEYS: Mapping[str, KeyType] = {key: kind for kind, keys in _KEYS_OF_TYPE for key in keys.split()}
"""Type of each key that mergegate interprets, in ``config.json`` and in the configuration of the language model."""

_ROPE_KEYS: Mapping[str, KeyType] = {
    **dict.fromkeys(("rope_theta", "factor", "partial_rotary_factor"), _NUMBER),
    **dict.fromkeys(("rope_type", "type"), _TEXT),
}
# Families in which a key has a list of values, one per layer, stage or encoder.
_LISTED: Mapping[str, tuple[str, ...]] = {
    "intermediate_size": ("gemma3n", "gemma3n_text"),
    "moe_intermediate_size": ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "ernie4_5_moe_vl"),
    "num_attention_heads": ("clap_audio_model", "glpn", "levit", "pvt", "pvt_v2", "segformer"),
    "num_hidden_layers": ("lxmert",),
}


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of the ``config.json`` at ``path``.

    Raises:
        InvalidInput: The file is missing or not a JSON object, or a value has the wrong type.
    """
    config = read_json(path)
    _check(config, str(path), "")
    return config


def _check(config: Mapping[str, Any], file: str, prefix: str) -> None:
    model_type = config.get("model_type")
    for key, value in config.items():
        kind = CONFIG_KEYS.get(key)
        if kind is None or (model_type in _LISTED.get(key, ()) and isinstance(value, (list, dict))):
            continue
        if not (kind.accepts(value) or (value is None and kind.nullable)):
            raise _type_error(file, prefix + key, value, kind)
        if isinstance(value, dict) and key in ("rope_scaling", "rope_parameters"):
            # The RoPE parameters may be grouped by layer type.
            groups = {f"{name}.": group for name, group in value.items() if name not in _ROPE_KEYS}
            for group_prefix, group in {"": value, **groups}.items():
                for name, inner_kind in _ROPE_KEYS.items() if isinstance(group, dict) else ():
                    if not (group.get(name) is None or inner_kind.accepts(group[name])):
                        raise _type_error(file, f"{prefix}{key}.{group_prefix}{name}", group[name], inner_kind)
        elif isinstance(value, dict) and key in TEXT_PARTS and not prefix:
            _check(value, file, f"{key}.")


def _type_error(file: str, key: str, value: Any, kind: KeyType) -> InvalidInput:
    return InvalidInput(
        f"{file}: {key}",
        found=f"{value!r:.60}",
        expected=kind.expected,
        remedy="correct the value in config.json, or download the file again",
    )

"""Tiny checkpoints of the networks that transformers builds around a described text family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import transformers
from tiny_families import _DEEPSEEK, TOKENS, WINDOW, TinyFamily, _text
from transformers import CONFIG_MAPPING

from mergegate.merge_core.architecture import described_families
from mergegate.merge_core.architecture.conversions import _content

LOADERS = ("AutoModelForMultimodalLM", "AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
# Values of sizes in the parts for images and sound.
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "image_size"), 16),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("patch_size", "num_mel_bins", "head_dim"), 8),
}
# Networks that are not tried: their forward pass needs a picture, or their tiny form takes a minute.
UNTRIED = frozenset({"blip-2", "instructblip", "instructblipvideo", "gemma4"})
# Settings that parts need in addition, because their defaults fit only their default sizes.
NEEDED: Mapping[str, Mapping[str, Any]] = {"fun_asr_nano": {"adaptor_config": {"hidden_size": 32}}}
# Settings of text families that the usual sizes do not contain.
TEXT: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 3},
    "deepseek_v3": {**_DEEPSEEK, "head_dim": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3, "block_multiple_of": 8},
}


def container_types() -> list[str]:
    """Return the model types of networks that transformers builds around a text family with a description."""
    described = {kind for family in described_families() for kind in family.model_types}
    texts = {kind: entry["text"][1] for kind, entry in _content()["structures"].items() if entry.get("text")}
    return sorted(kind for kind, text in texts.items() if text in described and kind not in UNTRIED)


def container(kind: str) -> TinyFamily:
    """Return the tiny checkpoint of a network."""
    config = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if not isinstance(value, dict) or "model_type" not in value:
            continue
        if key == "text_config":
            settings[key] = {**_text(value["model_type"]), **TEXT.get(value["model_type"], {})}
        else:
            small = {name: size for name, size in _SMALL.items() if isinstance(value.get(name), int)}
            settings[key] = {"model_type": value["model_type"], **small, **NEEDED.get(kind, {}).get(key, {})}
    for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id"):
        if name in config:
            settings[name] = 90
    if "vocab_size" in config:
        settings["vocab_size"] = TOKENS
    auto = next(name for name in LOADERS if CONFIG_MAPPING[kind] in getattr(transformers, name)._model_mapping)
    return TinyFamily(kind, kind, settings, auto, usual=False)

"""An adapter applied while streaming is what PEFT's merge_and_unload makes of it, bit by bit, for every kind of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_family import applied_by_us, differences, make_adapter, make_base, read_all, unloaded_by_peft

LINEAR = ["q_proj", "o_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

# name → (family, how the model differs, the adapter's configuration)
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {}, {"target_modules": LINEAR}),
    "patterns": (
        "llama",
        {},
        {
            "target_modules": LINEAR,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6, r"layers\.0\..*o_proj": 3},
            "alpha_pattern": {"down_proj": 5, "^model.layers.0.self_attn.q_proj": 1},
        },
    ),
    "rslora": ("llama", {}, {"target_modules": LINEAR, "use_rslora": True}),
    "dora": ("llama", {}, {"target_modules": LINEAR, "use_dora": True}),
    "biases": ("qwen2", {}, {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
    "all biases": ("gpt2", {}, {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
    "bias of B": ("qwen2", {}, {"target_modules": ["q_proj"], "lora_bias": True}),
    "transposed": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "transposed unsaid": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"]}),
    "modules to save": (
        "llama",
        {},
        {"target_modules": LINEAR, "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
    ),
    "tokens": ("llama", {}, {"target_modules": LINEAR, "trainable_token_indices": [3, 94, 17]}),
    "tokens of tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": LINEAR, "trainable_token_indices": {"embed_tokens": [3, 94]}},
    ),
    "tied": ("llama", {"tie_word_embeddings": True}, {"target_modules": LINEAR}),
    "head": ("llama", {}, {"target_modules": ["lm_head", "q_proj"]}),
    "experts of mixtral": ("mixtral", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts of qwen3": ("qwen3_moe", {}, {"target_parameters": EXPERTS[::-1], "rank_pattern": {"down_proj": 2}}),
    "experts of gpt-oss": ("gpt_oss", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts of llama 4": (
        "llama4",
        {},
        {"target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]},
    ),
    "one parameter": ("mixtral", {}, {"target_parameters": ["experts.down_proj"]}),
    "vision": (
        "gemma3_vision",
        {},
        {"target_modules": r".*(language_model.*q_proj|vision_tower.*k_proj|language_model.*down_proj)"},
    ),
}
EMBEDDINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "embedding": ("llama", {}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied embedding": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens"]}),
}
COLUMN_NORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora embedding": ("llama", {}, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "dora transposed": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}),
}


def both(
    place: Path, kind: tuple[str, dict[str, Any], dict[str, Any]], dtype: torch.dtype, block: int = 1 << 20
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Stored tensors of the base, of what we make of base and adapter, and of what PEFT makes."""
    family, model, config = kind
    base = make_base(place / "base", family, dtype, **model)
    adapter = make_adapter(base, place / "adapter", dtype, **config)
    ours = applied_by_us(base, adapter, place / "ours", block=block)
    return read_all(base), ours, unloaded_by_peft(base, adapter, place / "theirs", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_is_what_peft_makes_of_it(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    base, ours, theirs = both(tmp_path, KINDS[kind], dtype)
    assert differences(ours, theirs) == {}
    assert differences(ours, base) != {}

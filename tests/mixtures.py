"""Build tiny mixtures of experts with transformers, in the layouts that it writes, and compute their logits."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from builders.models import text_generator

torch.set_num_threads(1)

EXPERTS = 4
_COMMON: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LOCAL = {"intermediate_size": 24, "num_local_experts": EXPERTS}
_ROUTED = {"intermediate_size": 40, "moe_intermediate_size": 24}
_GROUPS = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1}
_CONVOLVED = {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
_TEMPERED = {"moe_layers": [0, 1], "attn_temperature_tuning": False, "use_qk_norm": False}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", _LOCAL),
    "qwen3_moe": ("Qwen3Moe", {**_ROUTED, "num_experts": EXPERTS, "norm_topk_prob": True}),
    "glm4_moe": ("Glm4Moe", {**_ROUTED, **_GROUPS, "n_routed_experts": EXPERTS, "n_shared_experts": 1}),
    "lfm2_moe": ("Lfm2Moe", {**_ROUTED, **_CONVOLVED, "num_experts": EXPERTS}),
    "granitemoe": ("GraniteMoe", _LOCAL),
    "phimoe": ("Phimoe", _LOCAL),
    "llama4": ("Llama4", {**_LOCAL, **_TEMPERED, "intermediate_size_mlp": 40}),
    "gpt_oss": ("GptOss", _LOCAL),
}


def build(family: str, seed: int = 0) -> Any:
    """Return a random model; router biases, if the family has any, are not zero."""
    torch.manual_seed(seed)
    prefix, settings = FAMILIES[family]
    model = text_generator(prefix, **_COMMON, **settings).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "bias" in name:
                tensor.copy_(0.1 * torch.randn_like(tensor))
    return model


def related(model: Any, seed: int, share: float = 0.1) -> Any:
    """Return a copy of `model` with noise of `share` times the standard deviation of each tensor."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            if tensor.is_floating_point():
                spread = tensor.float().std() if tensor.numel() > 1 else 0.0
                tensor += share * spread * torch.randn(tensor.shape, generator=generator)
    return other


def save(model: Any, directory: Path, *, fused: bool = False) -> Path:
    """Write the model in its family's layout on disk, or with `fused` in its layout in memory."""
    model.save_pretrained(directory, save_original_format=not fused)
    return directory


def tokens(count: int = 24) -> torch.Tensor:
    return torch.randint(3, 48, (2, count), generator=torch.Generator().manual_seed(7))


def logits(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        # For a memory-mapped file, torch may choose another kernel.
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = tensor.data.clone()
        return model(tokens() if ids is None else ids).logits


def load(directory: Path) -> Any:
    """Load the model in `directory`, and check that no key is missing or unexpected."""
    kind = json.loads((directory / "config.json").read_text())["architectures"][0]
    model, told = getattr(transformers, kind).from_pretrained(
        directory, dtype="auto", output_loading_info=True, local_files_only=True
    )
    assert not told["missing_keys"], told
    assert not told["unexpected_keys"], told
    assert not told["mismatched_keys"], told
    return model.eval()


def permuted(model: Any, order: Sequence[int]) -> Any:
    """Return the same function with permuted experts: expert `i` is the former expert `order[i]`."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in other.state_dict().items():
            part = name.rpartition("layers.")[2]
            routed = any(word in part for word in ("gate.weight", "gate.e_score", "router", "expert_bias", "experts."))
            if routed and "shared" not in part and tensor.shape[:1] == (EXPERTS,):
                tensor.copy_(tensor[list(order)].clone())
    return other

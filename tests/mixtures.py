"""Build tiny mixtures of experts with transformers, in the layouts that it writes, and compute their logits."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

torch.set_num_threads(1)

EXPERTS = 4
_COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _mixtral() -> Any:
    config = transformers.MixtralConfig(**_COMMON, intermediate_size=24, num_local_experts=EXPERTS)
    return transformers.MixtralForCausalLM(config)


def _qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **_COMMON, intermediate_size=40, moe_intermediate_size=24, num_experts=EXPERTS, norm_topk_prob=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _glm4_moe() -> Any:
    config = transformers.Glm4MoeConfig(
        **_COMMON, intermediate_size=40, moe_intermediate_size=24, n_routed_experts=EXPERTS, n_shared_experts=1,
        first_k_dense_replace=0, n_group=2, topk_group=1,
    )  # fmt: skip
    return transformers.Glm4MoeForCausalLM(config)


def _lfm2_moe() -> Any:
    config = transformers.Lfm2MoeConfig(
        **_COMMON, intermediate_size=40, moe_intermediate_size=24, num_experts=EXPERTS, num_dense_layers=1,
        layer_types=["conv", "full_attention"],
    )  # fmt: skip
    return transformers.Lfm2MoeForCausalLM(config)


def _granite() -> Any:
    config = transformers.GraniteMoeConfig(**_COMMON, intermediate_size=24, num_local_experts=EXPERTS)
    return transformers.GraniteMoeForCausalLM(config)


def _phimoe() -> Any:
    config = transformers.PhimoeConfig(**_COMMON, intermediate_size=24, num_local_experts=EXPERTS)
    return transformers.PhimoeForCausalLM(config)


def _llama4() -> Any:
    config = transformers.Llama4TextConfig(
        **_COMMON, intermediate_size=24, intermediate_size_mlp=40, num_local_experts=EXPERTS, moe_layers=[0, 1],
        attn_temperature_tuning=False, use_qk_norm=False,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config)


def _gpt_oss() -> Any:
    config = transformers.GptOssConfig(**_COMMON, intermediate_size=24, num_local_experts=EXPERTS)
    return transformers.GptOssForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "lfm2_moe": _lfm2_moe,
    "granitemoe": _granite,
    "phimoe": _phimoe,
    "llama4": _llama4,
    "gpt_oss": _gpt_oss,
}


def build(family: str, seed: int = 0) -> Any:
    """Return a random model; router biases, if the family has any, are not zero."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "bias" in name:
                tensor.copy_(0.1 * torch.randn_like(tensor))
    return model


def related(model: Any, seed: int, share: float = 0.1) -> Any:
    """Return a copy of `model` with noise of `share` times the standard deviation of each tensor."""
    import copy

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

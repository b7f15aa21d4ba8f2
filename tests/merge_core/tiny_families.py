"""Builds tiny random checkpoints with transformers, for each described family and some others.

They are small enough to run in seconds and large enough to expose errors. Several layers let the kinds of layers
alternate, windows are shorter than the texts, and all weights are random, including the norms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

LAYERS, TOKENS, WINDOW, LENGTH = 6, 96, 4, 20

_USUAL: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
_LATENT = {
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIGLIP = {**_VISION, "image_size": 16, "patch_size": 8, "model_type": "siglip_vision_model"}
_CLIP = {**_VISION, "image_size": 16, "patch_size": 8, "model_type": "clip_vision_model", "projection_dim": 8}
_SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


_XGLM = {"vocab_size": TOKENS, "d_model": 32, "num_layers": LAYERS, "attention_heads": 4, "ffn_dim": 48}


@dataclass(frozen=True)
class TinyFamily:
    """Settings for a family's tiny checkpoint.

    Args:
        name: Name in the table of families.
        model_type: transformers' ``model_type``.
        settings: Configuration values in addition to the usual sizes.
        auto: transformers class that creates and loads the model.
        usual: Whether the usual sizes apply to the family.
        listed: Whether the saved config.json keeps keys that list kinds of layers. Older checkpoints lack them.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"
    usual: bool = True
    listed: bool = True

    @property
    def loader(self) -> Any:
        """The transformers class named ``auto``."""
        return getattr(transformers, self.auto)

    def config(self) -> Any:
        """Return the configuration."""
        sizes = dict(_USUAL) if self.usual else {}
        return AutoConfig.for_model(self.model_type, **{**sizes, **self.settings})


def _text(model_type: str, **settings: Any) -> dict[str, Any]:
    return {**_USUAL, "head_dim": 8, "model_type": model_type, **settings}


def _vision(name: str, model_type: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> TinyFamily:
    settings = {"text_config": text, "vision_config": vision, **more}
    return TinyFamily(name, model_type, settings, "AutoModelForImageTextToText", usual=False)


_WINDOWED = {"sliding_window": WINDOW, "head_dim": 8}
_DENSE = (
    *("apertus", "arcee", "bitnet", "cohere", "ernie4_5", "falcon", "gemma", "glm", "glm4", "gpt_bigcode", "gpt_neox"),
    *("granite", "helium", "hunyuan_v1_dense", "llama", "ministral3", "mistral", "nemotron", "olmo", "olmo2", "opt"),
    *("persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "stablelm", "starcoder2"),
)
_SPECIAL: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "mistral": _WINDOWED,
    "ministral3": {"head_dim": 8},
    "phi3": {"sliding_window": WINDOW},
    "helium": {"head_dim": 8},
    "starcoder2": {"sliding_window": WINDOW},
    "hunyuan_v1_dense": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "qwen3": {"head_dim": 8},
    "persimmon": {"num_key_value_heads": 4},
    "phi": {"num_key_value_heads": 4},
    "stablelm": {"num_key_value_heads": 4},
    "olmo": {"num_key_value_heads": 4},
    "ernie4_5": {"head_dim": 8},
}

FAMILIES: tuple[TinyFamily, ...] = (
    *(TinyFamily(name, name, _SPECIAL.get(name, {})) for name in _DENSE),
    TinyFamily("llama, tied", "llama", {"tie_word_embeddings": True}),
    TinyFamily(
        "qwen2, window", "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    TinyFamily(
        "qwen2, window, unlisted",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        listed=False,
    ),
    TinyFamily(
        "gpt2",
        "gpt2",
        {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 64, "vocab_size": TOKENS},
        usual=False,
    ),
    TinyFamily(
        "gpt2, scaled by layer",
        "gpt2",
        {
            "n_embd": 32,
            "n_head": 4,
            "n_layer": LAYERS,
            "n_positions": 64,
            "vocab_size": TOKENS,
            "scale_attn_by_inverse_layer_idx": True,
        },
        usual=False,
    ),
    TinyFamily(
        "gptj",
        "gptj",
        {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 64, "vocab_size": TOKENS, "rotary_dim": 4},
        usual=False,
    ),
    TinyFamily(
        "codegen",
        "codegen",
        {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 64, "vocab_size": TOKENS, "rotary_dim": 4},
        usual=False,
    ),
    TinyFamily(
        "bloom", "bloom", {"hidden_size": 32, "n_head": 4, "n_layer": LAYERS, "vocab_size": TOKENS}, usual=False
    ),
    TinyFamily(
        "mpt",
        "mpt",
        {"d_model": 32, "n_heads": 4, "n_layers": LAYERS, "vocab_size": TOKENS, "max_seq_len": 64},
        usual=False,
    ),
    TinyFamily("gemma2", "gemma2", _WINDOWED),
    TinyFamily("gemma2, unlisted", "gemma2", _WINDOWED, listed=False),
    TinyFamily("vaultgemma", "vaultgemma", _WINDOWED, listed=False),
    TinyFamily("gemma3", "gemma3_text", {**_WINDOWED, "sliding_window_pattern": 3}),
    TinyFamily("gemma3, unlisted", "gemma3_text", {**_WINDOWED, "sliding_window_pattern": 3}, listed=False),
    TinyFamily("cohere2", "cohere2", {**_WINDOWED, "sliding_window_pattern": 2}),
    TinyFamily("cohere2, unlisted", "cohere2", {**_WINDOWED, "sliding_window_pattern": 2}, listed=False),
    TinyFamily("olmo3", "olmo3", {"sliding_window": WINDOW}),
    TinyFamily("olmo3, unlisted", "olmo3", {"sliding_window": WINDOW}, listed=False),
    TinyFamily("ministral", "ministral", {**_WINDOWED, "layer_types": ["full_attention", "sliding_attention"] * 3}),
    TinyFamily("smollm3", "smollm3", {"no_rope_layer_interval": 3}),
    TinyFamily("smollm3, unlisted", "smollm3", {"no_rope_layer_interval": 3}, listed=False),
    TinyFamily("exaone4", "exaone4", {**_WINDOWED, "sliding_window_pattern": 3}),
    TinyFamily("exaone4, unlisted", "exaone4", {**_WINDOWED, "sliding_window_pattern": 3}, listed=False),
    TinyFamily("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    TinyFamily("phimoe", "phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    TinyFamily("granitemoe", "granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    TinyFamily("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}),
    TinyFamily("qwen2_moe", "qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2}),
    TinyFamily("qwen3_moe", "qwen3_moe", {**_EXPERTS, "head_dim": 8, "mlp_only_layers": [1, 4]}),
    TinyFamily(
        "qwen3_next",
        "qwen3_next",
        {
            **_EXPERTS,
            **_LINEAR,
            "shared_expert_intermediate_size": 16,
            "full_attention_interval": 2,
            "mlp_only_layers": [1],
        },
    ),
    TinyFamily(
        "qwen3_next, unlisted",
        "qwen3_next",
        {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16, "full_attention_interval": 2},
        listed=False,
    ),
    TinyFamily("qwen3_5", "qwen3_5_text", {**_LINEAR, "full_attention_interval": 3}),
    TinyFamily("qwen3_5_moe", "qwen3_5_moe_text", {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16}),
    TinyFamily("deepseek_v2", "deepseek_v2", {**_DEEPSEEK, "topk_method": "greedy", "head_dim": 4}),
    TinyFamily("deepseek_v3", "deepseek_v3", _DEEPSEEK),
    TinyFamily(
        "glm4_moe",
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
        },
    ),
    TinyFamily(
        "dots1",
        "dots1",
        {
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    TinyFamily(
        "llama4",
        "llama4_text",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "no_rope_layer_interval": 3,
        },
    ),
    TinyFamily(
        "llama4, unlisted",
        "llama4_text",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "no_rope_layer_interval": 3,
        },
        listed=False,
    ),
    TinyFamily("gpt_oss", "gpt_oss", {**_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    TinyFamily(
        "granitemoehybrid",
        "granitemoehybrid",
        {
            **_MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention"] * 3,
        },
    ),
    TinyFamily(
        "jamba",
        "jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    TinyFamily("mamba", "mamba", {"state_size": 8}),
    TinyFamily("falcon_mamba", "falcon_mamba", {"state_size": 8}),
    TinyFamily("mamba2", "mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    TinyFamily("bamba", "bamba", {**_MAMBA, "attn_layer_indices": [1, 4]}),
    TinyFamily(
        "zamba2",
        "zamba2",
        {
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "num_key_value_heads": 4,
            "mamba_ngroups": 2,
            "layers_block_type": ["mamba", "hybrid"] * 3,
            "adapter_rank": 4,
            "use_mem_rope": False,
            "chunk_size": 8,
        },
    ),
    TinyFamily(
        "lfm2",
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 3, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 8},
    ),
    TinyFamily("lfm2, numbers", "lfm2", {"full_attn_idxs": [1, 4]}, listed=False),
    TinyFamily(
        "lfm2_moe", "lfm2_moe", {**_EXPERTS, "layer_types": ["conv", "full_attention"] * 3, "num_dense_layers": 2}
    ),
    TinyFamily(
        "nemotron_h",
        "nemotron_h",
        {
            **{key: value for key, value in _USUAL.items() if key != "num_hidden_layers"},
            "layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "head_dim": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "num_experts_per_tok": 2,
            "chunk_size": 8,
            "moe_latent_size": None,
        },
        usual=False,
    ),
    TinyFamily(
        "falcon_h1",
        "falcon_h1",
        {
            "mamba_d_state": 8,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_ssm": 64,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
            "head_dim": 8,
        },
    ),
    TinyFamily(
        "kimi_linear",
        "kimi_linear",
        {
            **_LATENT,
            "num_local_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 3,
            "first_k_dense_replace": 2,
        },
    ),
    TinyFamily(
        "deepseek_v4",
        "deepseek_v4",
        {
            **_INDEXER,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "q_lora_rank": 12,
            "o_lora_rank": 8,
            "o_groups": 2,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "partial_rotary_factor": 0.5,
            "qk_rope_head_dim": 4,
            "sliding_window": WINDOW,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    TinyFamily("hy_v3", "hy_v3", {**_EXPERTS, "head_dim": 8}),
    TinyFamily("hy_v4", "hy_v4", {**_LATENT, **_INDEXER, "q_lora_rank": 12, "hc_mult": 2}),
    TinyFamily(
        "lfm3",
        "lfm3",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["conv", "full_attention", "sliding_attention"] * 2,
        },
    ),
    _vision(
        "gemma3, vision",
        "gemma3",
        _text("gemma3_text", sliding_window=WINDOW, sliding_window_pattern=3),
        _SIGLIP,
        mm_tokens_per_image=4,
    ),
    _vision("llava", "llava", _text("llama"), _CLIP, image_token_index=90),
    _vision(
        "mistral3",
        "mistral3",
        _text("mistral", sliding_window=None),
        {**_VISION, "image_size": 16, "patch_size": 8, "model_type": "pixtral", "head_dim": 8},
        image_token_index=90,
    ),
    _vision(
        "qwen2_5_vl",
        "qwen2_5_vl",
        _text("qwen2_5_vl_text", rope_parameters=_SECTIONS),
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
        image_token_id=90,
        video_token_id=91,
    ),
    _vision(
        "qwen2_vl",
        "qwen2_vl",
        _text("qwen2_vl_text", rope_parameters=_SECTIONS),
        {"embed_dim": 16, "hidden_size": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=90,
        video_token_id=91,
    ),
    _vision(
        "qwen3_5, vision",
        "qwen3_5",
        _text("qwen3_5_text", **_LINEAR, full_attention_interval=3),
        {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32},
        image_token_id=90,
        video_token_id=91,
    ),
    _vision(
        "qwen3_5_moe, vision",
        "qwen3_5_moe",
        _text("qwen3_5_moe_text", **_LINEAR, **_EXPERTS, shared_expert_intermediate_size=16),
        {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32},
        image_token_id=90,
        video_token_id=91,
    ),
    _vision(
        "llama4, vision",
        "llama4",
        _text(
            "llama4_text",
            num_local_experts=4,
            intermediate_size_mlp=48,
            interleave_moe_layer_step=2,
            attention_chunk_size=8,
        ),
        {
            **_VISION,
            "image_size": 16,
            "patch_size": 8,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        image_token_index=90,
    ),
    _vision(
        "kimi_k25",
        "kimi_k25",
        {**_text("deepseek_v3", **_DEEPSEEK), "head_dim": 4},
        {**_VISION, "patch_size": 8, "pos_emb_height": 4, "pos_emb_width": 4, "model_type": "kimi_k25_vision"},
        projection_hidden_size=16,
        image_token_id=90,
        video_token_id=91,
        tie_word_embeddings=False,
    ),
    _vision(
        "mistral_large4",
        "mistral_large4",
        _text("mistral_large4_text", **_LATENT, **_INDEXER),
        {**_VISION, "image_size": 16, "patch_size": 8, "model_type": "pixtral", "head_dim": 8},
        image_token_index=90,
    ),
    _vision(
        "lfm3_vl",
        "lfm3_vl",
        _text("lfm3", sliding_window=WINDOW, layer_types=["conv", "full_attention", "sliding_attention"] * 2),
        {
            **_VISION,
            "num_key_value_heads": 2,
            "patch_size": 8,
            "layer_types": ["conv", "full_attention"],
            "model_type": "lfm3_vl_vision",
        },
        projector_hidden_size=16,
        image_token_id=90,
        video_token_id=91,
    ),
    _vision(
        "step3p7",
        "step3p7",
        _text(
            "step3p5",
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            share_expert_dim=16,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention"] * 3,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        {**_VISION, "image_size": 32, "patch_size": 8, "mlp_ratio": 1.5, "max_position_embeddings": 16},
        image_token_id=90,
    ),
    TinyFamily("bert", "bert", {}, "AutoModelForMaskedLM"),
    TinyFamily("bert, classifier", "bert", {"num_labels": 3}, "AutoModelForSequenceClassification"),
    TinyFamily("roberta", "roberta", {"pad_token_id": 1}, "AutoModelForMaskedLM"),
    TinyFamily("camembert", "camembert", {"pad_token_id": 1}, "AutoModelForMaskedLM"),
    TinyFamily("xlm-roberta", "xlm-roberta", {"pad_token_id": 1}, "AutoModelForMaskedLM"),
    TinyFamily("electra", "electra", {"embedding_size": 16}, "AutoModelForMaskedLM"),
    TinyFamily(
        "whisper",
        "whisper",
        {
            "vocab_size": TOKENS,
            "d_model": 32,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        "AutoModelForSpeechSeq2Seq",
        usual=False,
    ),
    TinyFamily(
        "t5",
        "t5",
        {
            "vocab_size": TOKENS,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "AutoModelForSeq2SeqLM",
        usual=False,
    ),
    TinyFamily("diffllama", "diffllama", {}),
    TinyFamily("minimax, not described", "minimax", {"num_local_experts": 4, "head_dim": 8}),
    TinyFamily("xglm, not described", "xglm", _XGLM, usual=False),
)

BY_NAME = {family.name: family for family in FAMILIES}
# Lists that transformers writes into config.json and that older checkpoints lack.
_LISTS = ("layer_types", "no_rope_layers", "moe_layers")


def make(family: TinyFamily, directory: Path, seed: int) -> Path:
    """Save a checkpoint with random weights. Every tensor is perturbed, including norms and biases."""
    torch.manual_seed(seed)
    model = family.loader.from_config(family.config()).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.05 * torch.randn_like(tensor))
    return save(family, model, directory)


def save(family: TinyFamily, model: Any, directory: Path, *, fused: bool = False) -> Path:
    """Write a model in the family's disk layout, or in its memory layout if ``fused`` is true."""
    model.save_pretrained(directory, save_original_format=not fused)
    if not family.listed:
        _without_lists(directory, family)
    return directory


def _without_lists(directory: Path, family: TinyFamily) -> None:
    path = directory / "config.json"
    content = json.loads(path.read_text())
    for key in _LISTS:
        content.pop(key, None)
    for key in ("sliding_window_pattern", "full_attention_interval", "full_attn_idxs"):
        if key in family.settings:
            content[key] = family.settings[key]
    path.write_text(json.dumps(content))


def inputs(family: TinyFamily, token: int | None = None) -> dict[str, torch.Tensor]:
    """Return two texts longer than any window, each containing ``token`` if it is set."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 80, (2, LENGTH), generator=generator)
    if token is not None:
        ids[:, LENGTH // 2] = token
    if family.model_type == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=generator), "decoder_input_ids": ids}
    if family.model_type == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids}
    return {"input_ids": ids}


def load(family: TinyFamily, directory: Path) -> Any:
    """Load a checkpoint with transformers in float32.

    Raises:
        AssertionError: Keys are missing, unexpected or of a different shape.
    """
    model, info = family.loader.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value and key.endswith("keys")}
    assert wrong == {}, wrong
    return model.eval()


def logits(family: TinyFamily, model: Any, token: int | None = None) -> torch.Tensor:
    """Return the model's logits for :func:`inputs`."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:  # Mapped memory may use other kernels.
            tensor.data = tensor.data.clone()
        more = {} if "Masked" in family.auto or "Sequence" in family.auto else {"use_cache": False}
        return model(**inputs(family, token), **more).logits

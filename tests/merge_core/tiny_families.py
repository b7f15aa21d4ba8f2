"""Tiny random checkpoints of described and other families, with enough layers for the kinds of layers to alternate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from mergegate.merge_core.architecture import described_families
from mergegate.merge_core.architecture.conversions import _content

LAYERS, TOKENS, WINDOW, LENGTH = 6, 96, 4, 20

_USUAL: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPS = {"n_group": 1, "topk_group": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_HEADS = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
_LATENT = {**_HEADS, **_ROUTED}
_DEEPSEEK = {**_LATENT, "n_group": 2, "topk_group": 1, "q_lora_rank": 12, "first_k_dense_replace": 2}
_LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR = {**_LINEAR_HEADS, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
_INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_PIXELS = {**_VISION, "image_size": 16, "patch_size": 8}
_SIGLIP = {**_PIXELS, "model_type": "siglip_vision_model"}
_CLIP = {**_PIXELS, "model_type": "clip_vision_model", "projection_dim": 8}
_PIXTRAL = {**_PIXELS, "model_type": "pixtral", "head_dim": 8}
_QWEN_VISION = {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
_VIDEO = {"image_token_id": 90, "video_token_id": 91}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {**_ROPE, "mrope_section": [1, 1, 2]}
_XGLM = {"vocab_size": TOKENS, "d_model": 32, "num_layers": LAYERS, "attention_heads": 4, "ffn_dim": 48}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 64, "vocab_size": TOKENS}
_LLAMA4_LAYERS = {"interleave_moe_layer_step": 2, "attention_chunk_size": 8}
_LLAMA4 = {**_LLAMA4_LAYERS, "num_local_experts": 4, "intermediate_size_mlp": 48}
_WHISPER = {
    "vocab_size": TOKENS, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 20, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_T5 = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}


@dataclass(frozen=True)
class TinyFamily:
    """Settings for a family's tiny checkpoint, in addition to the usual sizes unless they do not apply (``usual``).

    ``auto`` is its class in transformers. A family that is not ``listed`` lacks the lists of kinds of layers on disk.
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


_NEMOTRON: Mapping[str, Any] = {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe", "mlp"],
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "head_dim", "chunk_size"), 8),
    **_ROUTED,
    "n_groups": 2,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": None,
}


def _text(model_type: str, **settings: Any) -> dict[str, Any]:
    return {**_USUAL, "head_dim": 8, "model_type": model_type, **settings}


def _tiny(name: str, model_type: str = "", *, auto: str = "", usual: bool = True, **settings: Any) -> TinyFamily:
    """Return a family whose ``model_type`` is the first word of its name, if no other is given."""
    loader = {"auto": auto} if auto else {}
    return TinyFamily(name, model_type or name.partition(",")[0], settings, usual=usual, **loader)


def _both(name: str, model_type: str = "", **settings: Any) -> tuple[TinyFamily, TinyFamily]:
    """Return a family, and the same family as in older checkpoints, which do not list the kinds of their layers."""
    family = _tiny(name, model_type, **settings)
    return family, replace(family, name=f"{name}, unlisted", listed=False)


def _vision(name: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> TinyFamily:
    settings = {"text_config": text, "vision_config": vision, **more}
    return _tiny(name, auto="AutoModelForImageTextToText", usual=False, **settings)


_WINDOW = {"sliding_window": WINDOW}
_WINDOWED = {**_WINDOW, "head_dim": 8}
_NEXT = {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16, "full_attention_interval": 2}
_QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
_CONVOLVED = {"layer_types": ["conv", "full_attention", "sliding_attention"] * 2}
_DENSE = (
    *("apertus", "arcee", "bitnet", "cohere", "ernie4_5", "falcon", "gemma", "glm", "glm4", "gpt_bigcode", "gpt_neox"),
    *("granite", "helium", "hunyuan_v1_dense", "llama", "ministral3", "mistral", "nemotron", "olmo", "olmo2", "opt"),
    *("persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "stablelm", "starcoder2"),
)
_SPECIAL: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mistral": _WINDOWED,
    **dict.fromkeys(("phi3", "starcoder2"), _WINDOW),
    **{name: {"head_dim": 8} for name in ("glm", "glm4", "gemma", "ministral3", "helium", "hunyuan_v1_dense")},
    **{name: {"head_dim": 8} for name in ("seed_oss", "qwen3", "ernie4_5")},
    **{name: {"num_key_value_heads": 4} for name in ("persimmon", "phi", "stablelm", "olmo")},
}

FAMILIES: tuple[TinyFamily, ...] = (
    *(_tiny(name, **_SPECIAL.get(name, {})) for name in _DENSE), _tiny("llama, tied", tie_word_embeddings=True),
    *_both("qwen2, window", **_QWEN2_WINDOW), _tiny("gpt2", usual=False, **_GPT2),
    _tiny("gpt2, scaled by layer", usual=False, **_GPT2, scale_attn_by_inverse_layer_idx=True),
    _tiny("gptj", usual=False, **_GPT2, rotary_dim=4), _tiny("codegen", usual=False, **_GPT2, rotary_dim=4),
    _tiny("bloom", usual=False, hidden_size=32, n_head=4, n_layer=LAYERS, vocab_size=TOKENS),
    _tiny("mpt", usual=False, d_model=32, n_heads=4, n_layers=LAYERS, vocab_size=TOKENS, max_seq_len=64),
    *_both("gemma2", **_WINDOWED), TinyFamily("vaultgemma", "vaultgemma", _WINDOWED, listed=False),
    *_both("gemma3", "gemma3_text", **_WINDOWED, sliding_window_pattern=3),
    *_both("cohere2", **_WINDOWED, sliding_window_pattern=2), *_both("olmo3", **_WINDOW),
    _tiny("ministral", **_WINDOWED, layer_types=["full_attention", "sliding_attention"] * 3),
    *_both("smollm3", no_rope_layer_interval=3), *_both("exaone4", **_WINDOWED, sliding_window_pattern=3),
    _tiny("mixtral", **_LOCAL), _tiny("phimoe", **_LOCAL), _tiny("granitemoe", **_LOCAL),
    _tiny("olmoe", num_experts=4, num_experts_per_tok=2, intermediate_size=16),
    _tiny("qwen2_moe", **_EXPERTS, shared_expert_intermediate_size=16, decoder_sparse_step=2),
    _tiny("qwen3_moe", **_EXPERTS, head_dim=8, mlp_only_layers=[1, 4]),
    _tiny("qwen3_next", **_NEXT, mlp_only_layers=[1]),
    TinyFamily("qwen3_next, unlisted", "qwen3_next", _NEXT, listed=False),
    _tiny("qwen3_5", "qwen3_5_text", **_LINEAR, full_attention_interval=3),
    _tiny("qwen3_5_moe", "qwen3_5_moe_text", **_EXPERTS, **_LINEAR, shared_expert_intermediate_size=16),
    _tiny("deepseek_v2", **_DEEPSEEK, topk_method="greedy", head_dim=4), _tiny("deepseek_v3", **_DEEPSEEK),
    _tiny("glm4_moe", **_ROUTED, **_GROUPS, first_k_dense_replace=1, head_dim=8),
    _tiny("dots1", **_ROUTED, **_GROUPS, first_k_dense_replace=1, head_dim=8, n_shared_experts=1),
    *_both("llama4", "llama4_text", **_LLAMA4, head_dim=8, no_rope_layer_interval=3),
    _tiny("gpt_oss", **_WINDOWED, **_LOCAL),
    _tiny("granitemoehybrid", **_MAMBA, **_LOCAL, shared_intermediate_size=16, layer_types=["mamba", "attention"] * 3),
    _tiny(
        "jamba", num_experts=4, num_experts_per_tok=2, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False,
    ),
    _tiny("mamba", state_size=8), _tiny("falcon_mamba", state_size=8),
    _tiny("mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    _tiny("bamba", **_MAMBA, attn_layer_indices=[1, 4]),
    _tiny(
        "zamba2", mamba_d_state=8, n_mamba_heads=8, num_key_value_heads=4, mamba_ngroups=2, adapter_rank=4,
        layers_block_type=["mamba", "hybrid"] * 3, use_mem_rope=False, chunk_size=8,
    ),
    _tiny("lfm2", layer_types=["conv", "full_attention"] * 3, block_ffn_dim_multiplier=1.0, block_multiple_of=8),
    TinyFamily("lfm2, numbers", "lfm2", {"full_attn_idxs": [1, 4]}, listed=False),
    _tiny("lfm2_moe", **_EXPERTS, layer_types=["conv", "full_attention"] * 3, num_dense_layers=2),
    _tiny(
        "nemotron_h", usual=False, **{key: value for key, value in _USUAL.items() if key != "num_hidden_layers"},
        **_NEMOTRON,
    ),
    _tiny(
        "falcon_h1", mamba_d_state=8, mamba_n_heads=8, mamba_d_head=8, mamba_d_ssm=64, mamba_n_groups=2,
        mamba_chunk_size=8, head_dim=8,
    ),
    _tiny(
        "kimi_linear", **_LATENT, **_GROUPS, num_local_experts=4, linear_head_dim=8, linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"] * 3, first_k_dense_replace=2,
    ),
    _tiny(
        "deepseek_v4", **_INDEXER, **_ROUTED, **_WINDOWED, num_key_value_heads=1, q_lora_rank=12, o_lora_rank=8,
        o_groups=2, hc_mult=2, hc_sinkhorn_iters=3, partial_rotary_factor=0.5, qk_rope_head_dim=4,
    ),
    _tiny("hy_v3", **_EXPERTS, head_dim=8), _tiny("hy_v4", **_LATENT, **_INDEXER, q_lora_rank=12, hc_mult=2),
    _tiny("lfm3", **_WINDOWED, **_CONVOLVED),
    _vision(
        "gemma3, vision", _text("gemma3_text", **_WINDOW, sliding_window_pattern=3), _SIGLIP, mm_tokens_per_image=4
    ),
    _vision("llava", _text("llama"), _CLIP, image_token_index=90),
    _vision("mistral3", _text("mistral", sliding_window=None), _PIXTRAL, image_token_index=90),
    _vision(
        "qwen2_5_vl", _text("qwen2_5_vl_text", rope_parameters=_SECTIONS),
        {**_QWEN_VISION, "fullatt_block_indexes": [1]}, **_VIDEO,
    ),
    _vision(
        "qwen2_vl", _text("qwen2_vl_text", rope_parameters=_SECTIONS),
        {"embed_dim": 16, "hidden_size": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2}, **_VIDEO,
    ),
    _vision("qwen3_5, vision", _text("qwen3_5_text", **_LINEAR, full_attention_interval=3), _QWEN_VISION, **_VIDEO),
    _vision(
        "qwen3_5_moe, vision",
        _text("qwen3_5_moe_text", **_LINEAR, **_EXPERTS, shared_expert_intermediate_size=16), _QWEN_VISION, **_VIDEO,
    ),
    _vision(
        "llama4, vision", _text("llama4_text", **_LLAMA4),
        {**_PIXELS, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        image_token_index=90,
    ),
    _vision(
        "kimi_k25", {**_text("deepseek_v3", **_DEEPSEEK), "head_dim": 4},
        {**_VISION, "patch_size": 8, "pos_emb_height": 4, "pos_emb_width": 4, "model_type": "kimi_k25_vision"},
        projection_hidden_size=16, **_VIDEO, tie_word_embeddings=False,
    ),
    _vision("mistral_large4", _text("mistral_large4_text", **_LATENT, **_INDEXER), _PIXTRAL, image_token_index=90),
    _vision(
        "lfm3_vl", _text("lfm3", **_WINDOW, **_CONVOLVED),
        {
            **_VISION, "num_key_value_heads": 2, "patch_size": 8, "layer_types": ["conv", "full_attention"],
            "model_type": "lfm3_vl_vision",
        },
        projector_hidden_size=16, **_VIDEO,
    ),
    _vision(
        "step3p7",
        _text(
            "step3p5", **_ROUTED, **_WINDOW, share_expert_dim=16,
            layer_types=["full_attention", "sliding_attention"] * 3,
            rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), _ROPE),
        ),
        {**_VISION, "image_size": 32, "patch_size": 8, "mlp_ratio": 1.5, "max_position_embeddings": 16},
        image_token_id=90,
    ),
    _tiny("bert", auto="AutoModelForMaskedLM"),
    _tiny("bert, classifier", auto="AutoModelForSequenceClassification", num_labels=3),
    *(_tiny(name, auto="AutoModelForMaskedLM", pad_token_id=1) for name in ("roberta", "camembert", "xlm-roberta")),
    _tiny("electra", auto="AutoModelForMaskedLM", embedding_size=16),
    _tiny("whisper", auto="AutoModelForSpeechSeq2Seq", usual=False, **_WHISPER),
    _tiny("t5", auto="AutoModelForSeq2SeqLM", usual=False, **_T5, decoder_start_token_id=0), _tiny("diffllama"),
    _tiny("minimax, not described", num_local_experts=4, head_dim=8),
    _tiny("xglm, not described", usual=False, **_XGLM),
)  # fmt: skip

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
    """Load a checkpoint with transformers in float32; all keys must fit."""
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


# Networks around a described text family, with the sizes of their parts reduced.
_LOADERS = ("AutoModelForMultimodalLM", "AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
# Values of sizes in the parts for images and sound.
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "image_size"), 16),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("patch_size", "num_mel_bins", "head_dim"), 8),
}
# Networks that are not tried: no class loads them, their forward pass needs a picture, or their tiny form is too large.
_UNTRIED = frozenset({"blip-2", "instructblip", "instructblipvideo", "gemma4", "vibevoice", "vibevoice_asr"})
# Settings that parts need in addition, because their defaults fit only their default sizes.
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
# Settings of text families that the usual sizes do not contain.
_TEXTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 3},
    "deepseek_v3": {**_DEEPSEEK, "head_dim": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3, "block_multiple_of": 8},
    "nemotron_h": _NEMOTRON,
    "qwen2_vl_text": _SECTIONS,
    "qwen2_5_vl_text": _SECTIONS,
}


def container_types() -> list[str]:
    """Return the model types of networks that transformers builds around a text family with a description."""
    described = {kind for family in described_families() for kind in family.model_types}
    texts = {kind: entry["text"][1] for kind, entry in _content()["structures"].items() if entry.get("text")}
    return sorted(kind for kind, text in texts.items() if text in described and kind not in _UNTRIED)


def container(kind: str) -> TinyFamily:
    """Return the tiny checkpoint of a network."""
    config = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if not isinstance(value, dict) or "model_type" not in value:
            continue
        if key == "text_config":
            settings[key] = {**_text(value["model_type"]), **_TEXTS.get(value["model_type"], {})}
        else:
            small = {name: size for name, size in _SMALL.items() if isinstance(value.get(name), int)}
            settings[key] = {"model_type": value["model_type"], **small, **_NEEDED.get(kind, {}).get(key, {})}
    for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id"):
        if name in config:
            settings[name] = 90
    if "vocab_size" in config:
        settings["vocab_size"] = TOKENS
    auto = next(name for name in _LOADERS if CONFIG_MAPPING[kind] in getattr(transformers, name)._model_mapping)
    return TinyFamily(kind, kind, settings, auto, usual=False)

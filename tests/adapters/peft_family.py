"""Builds tiny models and adapters with transformers and PEFT, and the merged weights that PEFT gives for them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from builders.models import SMALL, text_generator
from safetensors.torch import load_file

from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.adapters import apply_adapter, open_adapter
from mergegate.merge_core.engine import EngineSettings

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL), "qwen2": ("Qwen2", SMALL), "gpt2": ("GPT2", GPT2),
    "mixtral": ("Mixtral", {**SMALL, **MOE}), "qwen3_moe": ("Qwen3Moe", {**SMALL, **MOE}),
    "gpt_oss": ("GptOss", {**SMALL, **MOE}), "llama4": ("Llama4", {**SMALL, **MOE, "intermediate_size_mlp": 48}),
    "granite": ("GraniteMoe", {**SMALL, **MOE}),
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def _gemma3_vision(**more: Any) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    parts = {"text_config": {**SMALL, "sliding_window": 8}}
    parts |= {"vision_config": {**VISION, "image_size": 28, "patch_size": 14}}
    return Gemma3ForConditionalGeneration(Gemma3Config(**parts, mm_tokens_per_image=4, **more))


def network(family: str, **more: Any) -> Any:
    """Return a model with random weights. ``more`` overrides values of its configuration."""
    if family == "gemma3_vision":
        return _gemma3_vision(**more)
    prefix, settings = MODELS[family]
    return text_generator(prefix, **{**settings, **more})


def make_base(place: Path, family: str, dtype: torch.dtype, **more: Any) -> Path:
    """Save a model with random weights in the on-disk layout of its family."""
    torch.manual_seed(0)
    model = network(family, **more).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(place)
    return place


def load_base(place: Path, dtype: torch.dtype) -> Any:
    import transformers

    from mergegate.merge_core.parsing import read_json

    kind = getattr(transformers, read_json(place / "config.json")["architectures"][0])
    return kind.from_pretrained(place, dtype=dtype)


def make_adapter(base: Path, place: Path, dtype: torch.dtype, *, seed: int = 1, **config: Any) -> Path:
    """Save an adapter on ``base`` whose parameters have all moved, as after training."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = config.pop("save_embedding_layers", "auto")
        model = get_peft_model(load_base(base, dtype), LoraConfig(**{"r": 4, "lora_alpha": 8, **config}))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                factor = 1 + noise if "magnitude" in name else noise
                moved = parameter.data.float() * factor if "magnitude" in name else parameter.data.float() + factor
                parameter.data.copy_(moved)
        model.save_pretrained(place, save_embedding_layers=tables)
    return place


def unloaded_by_peft(base: Path, adapter: Path, place: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that PEFT stores after merging the adapter into the base."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load_base(base, dtype), adapter).merge_and_unload()
        model.save_pretrained(place)
    return read_all(place)


def read_all(place: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(place.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def applied_by_us(base: Path, adapter: Path, place: Path, *, block: int = 1 << 20) -> dict[str, torch.Tensor]:
    """Return the tensors that mergegate streams for the same adapter, in blocks of ``block`` elements."""
    checkpoint = apply_adapter(open_checkpoint(base), open_adapter(adapter))
    recipe = load_recipe({"merge_method": "passthrough", "models": [{"model": "m"}]})
    merge_weights(
        plan_merge(recipe, {"m": checkpoint}), place, settings=EngineSettings(block_elements=block, threads=2)
    )
    return read_all(place)


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest relative difference of each tensor that is not bit-identical.

    A tensor that only one side has, or whose dtype or shape differs, counts as infinitely different.
    """
    found = {name: float("inf") for name in ours.keys() ^ theirs.keys()}
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        if one.dtype != other.dtype or one.shape != other.shape:
            found[name] = float("inf")
        elif not torch.equal(one, other):
            distance = (one.double() - other.double()).abs().max() / other.double().abs().max()
            found[name] = float(distance)
    return found

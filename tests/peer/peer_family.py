"""Writes tiny Llama checkpoints for both tools, by default without equal magnitudes among a tensor's differences."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

BASE, TUNED = "base", ("one", "two", "three")
LAYERS, HIDDEN, WIDE, TOKENS = 4, 16, 24, 40

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": TOKENS,
}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor of a Llama."""
    yield "model.embed_tokens.weight", (TOKENS, HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{name}.self_attn.k_proj.weight", (HIDDEN // 2, HIDDEN)
        yield f"{name}.self_attn.v_proj.weight", (HIDDEN // 2, HIDDEN)
        yield f"{name}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{name}.mlp.gate_proj.weight", (WIDE, HIDDEN)
        yield f"{name}.mlp.up_proj.weight", (WIDE, HIDDEN)
        yield f"{name}.mlp.down_proj.weight", (HIDDEN, WIDE)
        yield f"{name}.input_layernorm.weight", (HIDDEN,)
        yield f"{name}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (TOKENS, HIDDEN)


def write_family(
    directory: Path, *, spread: float, dtype: torch.dtype, ties: bool = False, tied: Collection[str] = ()
) -> None:
    """Write a base (standard deviation 0.05) and three fine-tunes into ``directory``.

    Args:
        directory: Directory that gets one subdirectory per model.
        spread: Standard deviation of the differences between the fine-tunes and the base.
        dtype: float32 or float64.
        ties: Whether two differences of a tensor may have equal magnitudes.
        tied: Models whose output head is tied to the embedding and not stored.
    """
    generator = torch.Generator().manual_seed(7)
    models: dict[str, dict[str, torch.Tensor]] = {name: {} for name in (BASE, *TUNED)}
    for name, shape in shapes():
        base = 0.05 * torch.randn(shape, generator=generator, dtype=dtype)
        models[BASE][name] = base
        for model in TUNED:
            models[model][name] = _near(base, spread, generator, ties=ties)
    for model, tensors in models.items():
        place = directory / model
        place.mkdir(parents=True)
        if model in tied:
            del tensors["lm_head.weight"]
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        config = {**CONFIG, "tie_word_embeddings": model in tied, "torch_dtype": str(dtype).removeprefix("torch.")}
        (place / "config.json").write_text(json.dumps(config))


def _near(base: torch.Tensor, spread: float, generator: torch.Generator, *, ties: bool) -> torch.Tensor:
    tuned = base + spread * torch.randn(base.shape, generator=generator, dtype=base.dtype)
    while not ties:
        sizes = (tuned - base).abs().flatten()
        _, group, number = sizes.unique(return_inverse=True, return_counts=True)
        again = (number[group] > 1).reshape(base.shape)
        if not again.any():
            break
        tuned[again] += spread * torch.randn(int(again.sum()), generator=generator, dtype=base.dtype)
    return tuned

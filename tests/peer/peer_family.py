"""Writes tiny Llama checkpoints for both tools, and runs the other tool in its environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROJECT = Path(__file__).resolve().parents[2]
BASE, TUNED = "base", ("one", "two", "three")
LAYERS, HIDDEN, WIDE, TOKENS = 4, 16, 24, 40

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": TOKENS,
}  # fmt: skip


def interpreter(name: str) -> Path:
    return PROJECT / f".venv-{name}" / "bin" / "python"


def require_peer(name: str) -> None:
    """Skip the test without the environment of a peer, or fail it if the environment is required."""
    if not interpreter(name).exists():
        message = f"no environment: make .venv-{name}/ready"
        is_required = os.environ.get(f"MERGEGATE_REQUIRE_{name.upper()}")
        pytest.fail(message) if is_required else pytest.skip(message)


def run_peer(name: str, script: str, *arguments: str, directory: Path) -> None:
    """Run a script of this directory with the interpreter of a peer's environment."""
    command = [interpreter(name), Path(__file__).with_name(script), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ran = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


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

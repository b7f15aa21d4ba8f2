"""Checkpoints of realistic size that take up no disk space: real headers, with sparse regions for the weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint.safetensors_file import render_header
from mergegate.merge_core.checkpoint.tensors import BY_CODE

Shapes = Mapping[str, tuple[int, ...]]

# 70.6 B parameters in 723 tensors.
LLAMA_70B = {"layers": 80, "hidden": 8192, "wide": 28672, "keys": 1024, "tokens": 128256}


def llama(*, layers: int, hidden: int, wide: int, keys: int, tokens: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a Llama's tensors; ``keys`` is the width of the grouped key and value projections."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (tokens, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, wide)
        shapes[f"{at}.mlp.gate_proj.weight"] = (wide, hidden)
        shapes[f"{at}.mlp.up_proj.weight"] = (wide, hidden)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{at}.self_attn.k_proj.weight"] = (keys, hidden)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{at}.self_attn.q_proj.weight"] = (hidden, hidden)
        shapes[f"{at}.self_attn.v_proj.weight"] = (keys, hidden)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (tokens, hidden)
    return shapes


def save_sparse(directory: Path, shapes: Shapes, *, shards: int = 1, dtype: str = "BF16") -> Path:
    """Write config, index and shards of ``shapes``, with sparse weights that read as zeros."""
    directory.mkdir(parents=True)
    files = _divided(shapes, shards)
    for file, names in files.items():
        sizes = {name: math.prod(shapes[name]) * BY_CODE[dtype].size for name in names}
        header = render_header([(name, dtype, shapes[name], sizes[name]) for name in names], {"format": "pt"})
        (directory / file).write_bytes(header)
        os.truncate(directory / file, len(header) + sum(sizes.values()))
    if shards > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(_config(shapes)))
    vocab = {f"t{number}": number for number in range(16)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab}}))
    return directory


def _divided(shapes: Shapes, shards: int) -> dict[str, Sequence[str]]:
    names = list(shapes)
    if shards == 1:
        return {"model.safetensors": names}
    count = len(names)
    return {
        f"model-{number + 1:05d}-of-{shards:05d}.safetensors": names[
            number * count // shards : (number + 1) * count // shards
        ]
        for number in range(shards)
    }


def _config(shapes: Shapes) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": sum("input_layernorm" in name for name in shapes),
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "torch_dtype": "bfloat16",
    }


def weights_of(directory: Path) -> list[Path]:
    """Return the weight files of a checkpoint."""
    return sorted(directory.glob("*.safetensors"))


def header_bytes(file: Path) -> int:
    """Return the number of bytes before the first weight: the length field and the header."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")

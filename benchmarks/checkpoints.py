"""Create checkpoints for the benchmarks: a base and similar fine-tunes in Llama layout, bfloat16, three shards.

The checkpoints are created once and reused: ``<directory>/<family>/base``, ``.../one``, ``.../two``, ``.../three``.
Values are normal. Fine-tunes are the base plus noise of a tenth of its scale, so that magnitudes, signs and near ties
resemble real weights. A family is complete when its file ``complete`` exists.
"""

from __future__ import annotations

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

BASE = "base"
FINE_TUNES = ("one", "two", "three")
_SPREAD, _NOISE = 0.02, 0.002
_SHARDS = 3
_BLOCK = 1 << 24  # elements drawn in one step
_THREADS = 2


@dataclass(frozen=True)
class Family:
    """Properties that all checkpoints of a family share.

    Args:
        name: Directory name, which identifies the content.
        config: The Llama config.
        shapes: Tensor name → shape, in the order of the file.
        fine_tunes: Number of checkpoints in addition to the base.
    """

    name: str
    config: dict[str, object]
    shapes: dict[str, tuple[int, ...]]
    fine_tunes: int = len(FINE_TUNES)

    @property
    def parameters(self) -> int:
        """Number of parameters of one checkpoint."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def nbytes(self) -> int:
        """Bytes of one checkpoint."""
        return 2 * self.parameters

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all checkpoints, the base first."""
        return (BASE, *FINE_TUNES[: self.fine_tunes])


def llama_family(parameters: float) -> Family:
    """Return a Llama family with tied embeddings of about ``parameters``; 1.24e9 gives the shapes of Llama 3.2 1B."""
    hidden = max(64, round(2048 * (parameters / 1.236e9) ** (1 / 3) / 64) * 64)
    vocabulary = 128256 if parameters >= 5e8 else 32000 if parameters >= 2e7 else 2000
    per_layer = sum(math.prod(shape) for shape in _layer(0, hidden).values())
    layers = max(1, round((parameters - vocabulary * hidden) / per_layer))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        shapes.update(_layer(layer, hidden))
    shapes["model.norm.weight"] = (hidden,)
    total = sum(math.prod(shape) for shape in shapes.values())
    return Family(f"llama-{total / 1e6:.0f}M", _config(hidden, layers, vocabulary), shapes)


def giant_family(nbytes: int) -> Family:
    """Return a family whose weight is almost all in one tensor of fused experts, ``[experts, out, in]``."""
    hidden, out = 2048, 8192
    experts = round(nbytes / 2 / hidden / out)
    small = llama_family(1e6)
    shapes = {**small.shapes, "model.layers.0.mlp.experts.down_proj": (experts, out, hidden)}
    return Family(f"giant-{2 * experts * out * hidden / 1e9:.1f}GB", small.config, shapes, fine_tunes=2)


def ensure(family: Family, directory: Path) -> Path:
    """Create the checkpoints of ``family`` below ``directory`` unless they exist, and return their directory.

    Raises:
        SystemExit: The disk does not have enough room.
    """
    place = directory / family.name
    done = place / "complete"
    if done.exists():
        return place
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    need, free = family.nbytes * (len(family.models) + 1), shutil.disk_usage(place).free
    if need > free:
        raise SystemExit(
            f"{place}: {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB needed for the checkpoints and one result; "
            "choose another place with --directory, or a smaller --size"
        )
    for model in family.models:
        print(f"making {place.name}/{model}: {family.nbytes / 1e9:.2f} GB", flush=True)
        _write_checkpoint(family, place / model, model)
    done.touch()
    return place


def weight_files(checkpoint: Path) -> list[Path]:
    """Return the shards of a checkpoint, in order."""
    return sorted(checkpoint.glob("*.safetensors"))


def _layer(layer: int, hidden: int) -> dict[str, tuple[int, ...]]:
    name, wide, narrow = f"model.layers.{layer}", 4 * hidden, hidden // 4
    return {
        f"{name}.self_attn.q_proj.weight": (hidden, hidden),
        f"{name}.self_attn.k_proj.weight": (narrow, hidden),
        f"{name}.self_attn.v_proj.weight": (narrow, hidden),
        f"{name}.self_attn.o_proj.weight": (hidden, hidden),
        f"{name}.mlp.gate_proj.weight": (wide, hidden),
        f"{name}.mlp.up_proj.weight": (wide, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, wide),
        f"{name}.input_layernorm.weight": (hidden,),
        f"{name}.post_attention_layernorm.weight": (hidden,),
    }


def _config(hidden: int, layers: int, vocabulary: int) -> dict[str, object]:
    head = 64 if hidden >= 256 else 16
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // head // 4,
        "head_dim": head,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _write_checkpoint(family: Family, directory: Path, model: str) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(family.config, indent=1))
    groups = _split(family.shapes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_shard(directory / file, {name: family.shapes[name] for name in names}, model)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": family.nbytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _split(shapes: dict[str, tuple[int, ...]]) -> list[list[str]]:
    """Split the names into three runs of about the same size."""
    limit = sum(math.prod(shape) for shape in shapes.values()) / _SHARDS
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        if filled >= limit and len(groups) < _SHARDS:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += math.prod(shape)
    return groups


def _write_shard(file: Path, shapes: dict[str, tuple[int, ...]], model: str) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    blocks: list[tuple[str, int, int, int]] = []
    for name, shape in shapes.items():
        count = math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + 2 * count]}
        blocks += [(name, first, min(_BLOCK, count - first), position + 2 * first) for first in range(0, count, _BLOCK)]
        position += 2 * count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
    start = 8 + len(text)

    def draw(block: tuple[str, int, int, int]) -> None:
        name, first, count, offset = block
        with file.open("r+b") as out:
            out.seek(start + offset)
            out.write(_values(model, name, first, count))

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(draw, blocks))


def _values(model: str, name: str, first: int, count: int) -> memoryview:
    """Return elements ``first`` to ``first + count`` of a tensor as bfloat16 bytes, the same on every call."""
    import torch

    def normal(label: str, spread: float) -> torch.Tensor:
        import zlib

        generator = torch.Generator().manual_seed(zlib.crc32(f"{label} {name} {first}".encode()))
        return torch.empty(count).normal_(0, spread, generator=generator)

    values = normal(BASE, _SPREAD)
    if name.endswith("norm.weight"):
        values += 1
    if model != BASE:
        values += normal(model, _NOISE)
    stored = values.to(torch.bfloat16).view(torch.uint8).numpy()
    return stored.data

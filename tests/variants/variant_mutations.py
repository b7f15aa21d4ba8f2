"""Damage the files of a variant after a quantizer has written them, in the ways in which quantizers and disks fail."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegate.merge_core.checkpoint import GgufTensor, read_gguf_header
from mergegate.merge_core.files.hashing import sha256_file
from mergegate.tasks.checkpoints import Model
from mergegate.tasks.store import MANIFEST, Artifact, digest
from mergegate.tasks.variants import VariantFormat, VariantRecord

Mutation = Callable[[Path, random.Random], None]
WEIGHTS = "model.safetensors"
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "attn_", "ffn_")
# Bytes per block; the scale is the first two.
_HALF_SCALE = {"Q8_0": 34, "Q5_1": 24, "Q5_0": 22, "Q4_1": 20, "Q4_0": 18}


def truncate(directory: Path, rng: random.Random) -> None:
    """Cut the weights off somewhere: in the header, in a tensor, or right before the last byte."""
    path = _weights_of(directory)
    size = path.stat().st_size
    os.truncate(path, rng.choice([0, 7, rng.randrange(64, size), rng.randrange(size // 2, size), size - 1]))


def corrupt_scales(directory: Path, rng: random.Random) -> None:
    """Multiply all scales of three matrices, or set them to zero."""
    factor = rng.choice([0.0, 6.0, -1.0])
    weights = load_file(directory / WEIGHTS)
    for name in _sample(weights, rng):
        scaled = name.removesuffix("weight") + "weight_scale"
        scaled = scaled if scaled in weights else name
        weights[scaled] = (weights[scaled].float() * factor).to(weights[scaled].dtype)
    save_file(weights, directory / WEIGHTS, {"format": "pt"})


def swap_tensors(directory: Path, rng: random.Random) -> None:
    """Exchange the matrices of two layers, three times."""
    weights = load_file(directory / WEIGHTS)
    matrices = [name for name in sorted(weights) if name.endswith("weight") and any(w in name for w in _MATRICES)]
    pairs = [pair for pair in combinations(matrices, 2) if weights[pair[0]].shape == weights[pair[1]].shape]
    for first, second in rng.sample(pairs, 3):
        weights[first], weights[second] = weights[second], weights[first]
    save_file({name: tensor.clone() for name, tensor in weights.items()}, directory / WEIGHTS, {"format": "pt"})


def put_nan(directory: Path, rng: random.Random) -> None:
    """Replace one number of one matrix or of its scales by NaN."""
    weights = load_file(directory / WEIGHTS)
    floats = [name for name in _sample(weights, rng, 99) if weights[name].dtype in (torch.bfloat16, torch.float32)]
    scales = [name for name in weights if name.endswith("weight_scale")]
    tensor = weights[rng.choice(floats or sorted(scales))]
    tensor.view(-1)[rng.randrange(tensor.numel())] = float("nan")
    save_file(weights, directory / WEIGHTS, {"format": "pt"})


def swap_token_ids(directory: Path, rng: random.Random) -> None:
    """Exchange the ids of two letters in the tokenizer."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = rng.sample(sorted(token for token in ids if len(token) == 1 and token.isalpha()), 2)
    ids[first], ids[second] = ids[second], ids[first]
    path.write_text(json.dumps(tokenizer))


def change_pre_tokenizer(directory: Path, rng: random.Random) -> None:
    """Let the tokenizer treat a text in another way before it looks up ids."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = rng.choice(
        [{"type": "Prepend", "prepend": "a"}, {"type": "Replace", "pattern": {"String": "r"}, "content": "s"}]
    )
    path.write_text(json.dumps(tokenizer))


def lose_template(directory: Path, rng: random.Random) -> None:
    """Remove the chat template."""
    (directory / "chat_template.jinja").unlink()


def truncate_template(directory: Path, rng: random.Random) -> None:
    """Keep only the beginning of the chat template."""
    path = directory / "chat_template.jinja"
    path.write_text(path.read_text()[: rng.randrange(5, 60)])


def corrupt_gguf_scales(directory: Path, rng: random.Random) -> None:
    """Multiply all scales of three matrices in a GGUF file, or set them to zero."""
    factor = rng.choice([0.0, 6.0, -1.0])
    path, matrices = _gguf_matrices(directory)
    content = bytearray(path.read_bytes())
    for tensor in rng.sample(matrices, 3):
        place = slice(tensor.offset, tensor.offset + tensor.nbytes)
        if tensor.type in _HALF_SCALE:
            blocks = np.frombuffer(content[place], np.uint8).reshape(-1, _HALF_SCALE[tensor.type]).copy()
            scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            blocks[:, :2] = (scales * factor).astype(np.float16).view(np.uint8)
            content[place] = blocks.tobytes()
        else:
            kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.type]
            values = torch.frombuffer(content[place], dtype=torch.uint8).view(kind)
            content[place] = (values * factor).view(torch.uint8).numpy().tobytes()
    path.write_bytes(content)


def swap_gguf_tensors(directory: Path, rng: random.Random) -> None:
    """Exchange the contents of two matrices in a GGUF file, three times."""
    path, matrices = _gguf_matrices(directory)
    content = bytearray(path.read_bytes())
    pairs = [
        pair for pair in combinations(matrices, 2) if pair[0].shape == pair[1].shape and pair[0].type == pair[1].type
    ]
    for first, second in rng.sample(pairs, 3):
        one, other = (slice(tensor.offset, tensor.offset + tensor.nbytes) for tensor in (first, second))
        content[one], content[other] = content[other], content[one]
    path.write_bytes(content)


def put_gguf_nan(directory: Path, rng: random.Random) -> None:
    """Replace the scale of one block in a GGUF file by NaN."""
    path, matrices = _gguf_matrices(directory)
    content = bytearray(path.read_bytes())
    tensor = rng.choice(matrices)
    block = _HALF_SCALE.get(tensor.type, 2)
    at = tensor.offset + block * rng.randrange(tensor.nbytes // block)
    content[at : at + 2] = b"\xff\x7f"  # NaN in float16 and in bfloat16
    path.write_bytes(content)


def swap_gguf_tokens(directory: Path, rng: random.Random) -> None:
    """Exchange two letters in the tokens of a GGUF file."""
    first, second = rng.sample("abcdefghijklmnopqrstuvwxyz", 2)
    mark = _text(first), _text(second)
    path = _weights_of(directory)
    content = path.read_bytes()
    start = content.index(_text("tokenizer.ggml.tokens"))
    end = content.index(b"tokenizer.ggml.token_type")
    tokens = content[start:end].replace(mark[0], b"\0" * 9).replace(mark[1], mark[0]).replace(b"\0" * 9, mark[1])
    path.write_bytes(content[:start] + tokens + content[end:])


def change_gguf_pre_tokenizer(directory: Path, rng: random.Random) -> None:
    """Name other splitting rules in a GGUF file, or rules that no llama.cpp knows, with as many letters."""
    path = _weights_of(directory)
    content = path.read_bytes()
    label = read_gguf_header(path).metadata["tokenizer.ggml.pre"]
    assert isinstance(label, str)
    other = "?" * len(label)
    key = _text("tokenizer.ggml.pre") + (8).to_bytes(4, "little")
    assert key + _text(label) in content
    path.write_bytes(content.replace(key + _text(label), key + _text(other)))


def change_gguf_end_token(directory: Path, rng: random.Random) -> None:
    """Declare a letter as the token that ends an answer."""
    path = _weights_of(directory)
    content = bytearray(path.read_bytes())
    key = _text("tokenizer.ggml.eos_token_id") + (4).to_bytes(4, "little")
    at = content.index(key) + len(key)
    content[at : at + 4] = rng.randrange(3, 29).to_bytes(4, "little")
    path.write_bytes(content)


def lose_gguf_template(directory: Path, rng: random.Random) -> None:
    """Rename the metadata with the chat template, so that no program finds it."""
    path = _weights_of(directory)
    path.write_bytes(path.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatX"))


def change_gguf_template(directory: Path, rng: random.Random) -> None:
    """Change one part of the chat template, with as many letters."""
    path = _weights_of(directory)
    content = path.read_bytes()
    assert b"rstrip('>') + '>'" in content
    path.write_bytes(content.replace(b"rstrip('>') + '>'", b"rstrip('>') + ':'"))


MUTATIONS: Mapping[str, Mapping[str, Mutation]] = {
    "safetensors": {
        "truncated": truncate, "scales": corrupt_scales, "swapped": swap_tensors, "nan": put_nan,
        "token ids": swap_token_ids, "pre-tokenizer": change_pre_tokenizer, "lost template": lose_template,
        "cut template": truncate_template,
    },
    "gguf": {
        "truncated": truncate, "scales": corrupt_gguf_scales, "swapped": swap_gguf_tensors, "nan": put_gguf_nan,
        "token ids": swap_gguf_tokens, "pre-tokenizer": change_gguf_pre_tokenizer, "end token": change_gguf_end_token,
        "lost template": lose_gguf_template, "changed template": change_gguf_template,
    },
}  # fmt: skip


@contextmanager
def injected(
    variant_format: type[VariantFormat], mutations: Mapping[str, Mutation | Model], scratch: Path, seed: int = 0
) -> Iterator[None]:
    """Let the format build bad variants of the given types in this process.

    The files change after the quantizer and before any check, in a copy. A ``Model`` as the mutation means that the
    quantizer gets that model instead of the merge.
    """
    build = variant_format.build

    def build_and_damage(self: VariantFormat, merge: Model, variant_type: str, root: Path) -> Artifact[VariantRecord]:
        mutation = mutations.get(variant_type)
        if mutation is None or isinstance(mutation, Model):
            return build(self, mutation or merge, variant_type, root)
        artifact = build(self, merge, variant_type, root)
        copy = scratch / f"{variant_type}-{seed}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(artifact.directory, copy, ignore=shutil.ignore_patterns(MANIFEST, "value.json"))
        for path in copy.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        mutation(copy, random.Random(f"{variant_type} {seed}"))
        files = {str(path.relative_to(copy)): sha256_file(path) for path in sorted(copy.rglob("*")) if path.is_file()}
        assert files != dict(artifact.files), f"the mutation of {variant_type} changed nothing"
        return replace(artifact, directory=copy, files=files, digest=digest(files))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant_format, "build", build_and_damage)
        yield


def _weights_of(directory: Path) -> Path:
    (path,) = [path for path in directory.iterdir() if path.suffix in (".gguf", ".safetensors")]
    return path


def _sample(weights: Mapping[str, torch.Tensor], rng: random.Random, count: int = 3) -> list[str]:
    """Return the names of some matrices in the layers."""
    names = [n for n in sorted(weights) if n.endswith(".weight") and any(word in n for word in _MATRICES)]
    return rng.sample(names, min(count, len(names)))


def _gguf_matrices(directory: Path) -> tuple[Path, list[GgufTensor]]:
    path = _weights_of(directory)
    tensors = read_gguf_header(path).tensors
    return path, [one for one in tensors if len(one.shape) == 2 and one.name.startswith("blk.")]


def _text(value: str) -> bytes:
    content = value.encode()
    return len(content).to_bytes(8, "little") + content

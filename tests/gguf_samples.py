"""Write small GGUF files byte by byte, honest ones and others, without the code under test."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

CODES = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}
F32, Q8_0, Q4_K = (0, 1, 4), (8, 32, 34), (12, 256, 144)  # code, elements and bytes per block

Value = tuple[str, Any]
"""Format of ``struct`` and a number, or ``s`` and a text, or ``[`` and a format and a list."""
METADATA: Mapping[str, Value] = {
    "general.architecture": ("s", "llama"),
    "general.quantization_version": ("I", 2),
    "llama.block_count": ("I", 1),
    "llama.rope.freq_base": ("f", 10000.0),
    "tokenizer.ggml.add_bos_token": ("?", True),
    "tokenizer.ggml.tokens": ("[s", ["<s>", "a", "Ġb"]),
    "tokenizer.ggml.token_type": ("[i", [3, 1, 1]),
    "tokenizer.chat_template": ("s", "{% for m in messages %}{{ m['content'] }}{% endfor %}"),
}
TENSORS: Sequence[tuple[str, tuple[int, int, int], tuple[int, ...]]] = (
    ("token_embd.weight", Q8_0, (3, 64)),
    ("blk.0.attn_norm.weight", F32, (64,)),
    ("blk.0.ffn_up.weight", Q4_K, (2, 256)),
    ("output_norm.weight", F32, (5,)),
)


def text(value: str | bytes) -> bytes:
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def metadata_entry(key: str, value: Value) -> bytes:
    kind, content = value
    if kind == "s":
        return text(key) + struct.pack("<I", 8) + text(content)
    if kind == "[s":
        return text(key) + struct.pack("<IIQ", 9, 8, len(content)) + b"".join(map(text, content))
    if kind[0] == "[":
        packed = struct.pack(f"<{len(content)}{kind[1]}", *content)
        return text(key) + struct.pack("<IIQ", 9, CODES[kind[1]], len(content)) + packed
    return text(key) + struct.pack(f"<I{kind}", CODES[kind], content)


def table_entry(name: str, code: int, shape: Sequence[int], offset: int) -> bytes:
    """Return the entry of a tensor whose ``shape`` has the order of PyTorch."""
    head = text(name) + struct.pack("<I", len(shape))
    return head + struct.pack(f"<{len(shape)}QIQ", *reversed(shape), code, offset)


def gguf(
    metadata: Mapping[str, Value] = METADATA,
    tensors: Sequence[tuple[str, tuple[int, int, int], tuple[int, ...]]] = TENSORS,
    *,
    alignment: int = 32,
    fill: int = 1,
) -> bytes:
    """Return a GGUF file. The bytes of the tensors count up from ``fill``."""
    table, data = b"", b""
    for name, (code, block, size), shape in tensors:
        table += table_entry(name, code, shape, len(data))
        content = bytes((fill + number) % 251 for number in range(math.prod(shape) // block * size))
        data += content + bytes(-len(content) % alignment)
    entries = b"".join(metadata_entry(key, value) for key, value in metadata.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + entries + table
    return head + bytes(-len(head) % alignment) + data

"""Read the header of a GGUF file: its metadata, and the name, shape, type and position of every tensor.

This needs neither llama.cpp nor the weights, so a release can be verified without the environment of the quantizer. A
GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) begins with the magic ``GGUF``, a version, the
number of tensors and of metadata entries, followed by these entries and the tensors' descriptions. The data of the
tensors follows at the next multiple of ``general.alignment``. All numbers are little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # bytes, unless general.alignment is set
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9  # types of metadata values; the others are numbers
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEEPEST = 4  # nested arrays
# Types of tensors by their number: name, number of weights in a block, bytes of a block (ggml.h of llama.cpp 0.5.0).
_TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 28: ("F64", 1, 8), 30: ("BF16", 1, 2)},
    **{24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18)},
    **{10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176)},
    **{14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292)},
    **{16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 22: ("IQ2_S", 256, 82)},
    **{18: ("IQ3_XXS", 256, 98), 21: ("IQ3_S", 256, 110), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136)},
    **{19: ("IQ1_S", 256, 50), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66)},
    **{39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36)},
}


@dataclass(frozen=True)
class GgufTensor:
    """Description of one tensor."""

    name: str
    shape: tuple[int, ...]  # innermost dimension first, as ggml counts
    type: str  # 'Q8_0'
    offset: int  # position of its first byte in the file
    bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a GGUF file."""

    metadata: Mapping[str, Any]  # values by key, such as 'general.architecture'; arrays are tuples
    tensors: Mapping[str, GgufTensor]
    end: int  # position after the last tensor's data

    @property
    def tensor_types(self) -> dict[str, int]:
        """Number of tensors by type, the most frequent type first."""
        return dict(Counter(tensor.type for tensor in self.tensors.values()).most_common())


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of the GGUF file at ``path``.

    Raises:
        InvalidInput: It is not a complete GGUF file: the header is damaged, two tensors overlap, or the file is shorter
            than its tensors. The error names the field or tensor.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).header()
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise InvalidInput(str(path), found=f"not readable: {error}", expected="a GGUF file") from None


class _Reader:
    """Cursor over the bytes of a file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._size = path, content, len(content)
        self._at = 0

    def header(self) -> GgufHeader:
        if (magic := self._bytes(4, "the magic")) != _MAGIC:
            raise self._problem("the magic", f"{magic!r}", f"{_MAGIC!r}: a GGUF file")
        if (version := self._number("I", "the version")) not in _VERSIONS:
            raise self._problem("the version", f"{version}", f"version {' or '.join(map(str, _VERSIONS))}")
        tensors, entries = self._count("the number of tensors"), self._count("the number of metadata entries")
        metadata: dict[str, Any] = {}
        for index in range(entries):
            key = self._string(f"key {index} of the metadata")
            if key in metadata:
                raise self._problem(f"metadata {key}", "the key twice", "every key once")
            metadata[key] = self._value(self._number("I", f"metadata {key}"), f"metadata {key}")
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._problem("metadata general.alignment", f"{alignment!r}", "a positive number of bytes")
        descriptions = [self._tensor(index) for index in range(tensors)]
        begin = math.ceil(self._at / alignment) * alignment
        end = begin
        placed: dict[str, GgufTensor] = {}
        for tensor in sorted(descriptions, key=lambda tensor: tensor.offset):
            if tensor.name in placed or tensor.offset % alignment or begin + tensor.offset < end:
                found = "the name twice" if tensor.name in placed else f"data at offset {tensor.offset:,}"
                raise self._problem(f"tensor {tensor.name}", found, "data of its own at an aligned offset")
            end = begin + tensor.offset + tensor.bytes
            if end > self._size:
                raise self._problem(
                    f"tensor {tensor.name}",
                    f"data up to byte {end:,} in a file of {self._size:,} bytes",
                    "a complete file",
                    "it is truncated: copy or build it again",
                )
            placed[tensor.name] = GgufTensor(
                tensor.name, tensor.shape, tensor.type, begin + tensor.offset, tensor.bytes
            )
        return GgufHeader(metadata, {tensor.name: placed[tensor.name] for tensor in descriptions}, end)

    def _tensor(self, index: int) -> GgufTensor:
        """Return the description of a tensor, with its offset in the data instead of the file."""
        name = self._string(f"name of tensor {index}")
        field = f"tensor {name}"
        if not 0 < (dimensions := self._number("I", field)) <= _MOST_DIMENSIONS:
            raise self._problem(field, f"{dimensions} dimensions", f"1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number("Q", field) for _ in range(dimensions))
        number, offset = self._number("I", field), self._number("Q", field)
        if number not in _TENSOR_TYPES:
            raise self._problem(field, f"type {number}", "a type of ggml that mergegate knows")
        name_of_type, block, size = _TENSOR_TYPES[number]
        if shape[0] % block or not all(shape):
            raise self._problem(field, f"shape {shape} of type {name_of_type}", f"rows divisible by {block}")
        return GgufTensor(name, shape, name_of_type, offset, math.prod(shape) // block * size)

    def _value(self, kind: int, field: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string(field)
        if kind != _ARRAY:
            if kind not in _NUMBERS:
                raise self._problem(field, f"a value of type {kind}", f"one of {sorted((*_NUMBERS, _STRING, _ARRAY))}")
            return self._number(_NUMBERS[kind], field)
        inner, count = self._number("I", field), self._count(field)
        if depth >= _DEEPEST:
            raise self._problem(field, "arrays in arrays", f"at most {_DEEPEST}")
        if inner in _NUMBERS:
            content = self._bytes(count * struct.calcsize(f"<{_NUMBERS[inner]}"), field)
            return struct.unpack(f"<{count}{_NUMBERS[inner]}", content)
        return tuple(self._value(inner, field, depth + 1) for _ in range(count))

    def _string(self, field: str) -> str:
        return self._bytes(self._count(field), field).decode(errors="surrogateescape")

    def _count(self, field: str) -> int:
        """Return a number of entries, each of which takes at least one byte of the rest of the file."""
        count: int = self._number("Q", field)
        if count > self._size - self._at:
            raise self._problem(field, f"{count:,} entries in a file of {self._size:,} bytes", "a complete file")
        return count

    def _number(self, code: str, field: str) -> Any:
        (number,) = struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}"), field))
        return number

    def _bytes(self, count: int, field: str) -> bytes:
        if self._at + count > self._size:
            raise self._problem(field, f"the end of the file at byte {self._size:,}", "a complete file")
        content = self._content[self._at : self._at + count]
        self._at += count
        return content

    def _problem(self, field: str, found: str, expected: str, remedy: str = "") -> InvalidInput:
        return InvalidInput(f"{self._path}: {field}", found=found, expected=expected, remedy=remedy)

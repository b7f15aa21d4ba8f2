"""Read the headers of untrusted GGUF files: metadata and table of tensors, but not the weights.

A file consists of the magic ``GGUF``, the version, the numbers of tensors and of metadata entries, the entries, the
table of tensors, and the bytes of the tensors. Every tensor starts at a multiple of the alignment, directly after the
one before it (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). llama.cpp refuses other offsets, and so does
this reader. All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NoReturn

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import open_buffered

# The largest vocabularies (262,144 tokens and 515,000 merge rules) make headers of 16 MB. Arrays are hashed while they
# are read. Only the other values and the table of tensors are held in memory.
MAX_HEADER_BYTES = 256_000_000
MAX_TENSORS = 65_536  # GGUF stores all experts of a layer in one tensor, so the largest files have about 2,000
_MAX_ENTRIES = 16_384
_MAX_TEXT_BYTES = 4_000_000  # of all keys and text values together; chat templates have up to 30 KB
_MAX_ITEMS = 4_000_000  # texts in one array
_MAX_ITEM_BYTES = 1_000_000  # of one text in an array
_MAX_NAME_BYTES = 63  # GGML_MAX_NAME without the final zero byte
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_VERSIONS = (2, 3)  # version 1 had counts of 32 bits; nothing has written it since 2023
_DEFAULT_ALIGNMENT = 32
_CHUNK_BYTES = 1_000_000
_DAMAGED = "download or copy the file again. It is damaged, or llama.cpp did not write it"
_UNKNOWN = "use a newer mergegate, if a newer llama.cpp wrote the file"

_NUMBERS: Mapping[int, tuple[str, str]] = {  # name and format of each number type, by its code
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    7: ("bool", "<B"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}
_TEXT, _ARRAY = 8, 9

# Name, elements per block and bytes per block of each tensor type, by its code (enum ggml_type in ggml.h, and the
# structures block_* in ggml-common.h). Codes that are missing here were removed from GGUF.
_TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """Array in the metadata, such as the tokens of a vocabulary. Its items are not held in memory.

    Attributes:
        item_type: Type of the items, such as ``string`` or ``float32``.
        count: Number of items.
        sha256: Hash of the items as they are encoded in the file, 64 hex digits. Equal arrays have equal hashes.
    """

    item_type: str
    count: int
    sha256: str


GgufValue = str | int | float | bool | GgufArray
"""Value of a metadata entry."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location, type and shape of one tensor in a GGUF file.

    Attributes:
        name: Name in llama.cpp, such as ``blk.0.attn_q.weight``.
        type: Name of the number format, such as ``Q8_0``.
        shape: Size of each dimension in the order of PyTorch: rows first. The file has the reverse order.
        offset: Position of the first byte, from the start of the file.
        nbytes: Number of bytes, without padding.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything in a GGUF file except the weights.

    Attributes:
        version: Version of the format: 2 or 3.
        metadata: Values by key, such as ``general.architecture``, in the order of the file.
        tensors: Tensors in the order of their bytes.
        table_end: Position after the table of tensors, from the start of the file. Padding follows.
        data_offset: Position of the first tensor, from the start of the file.
    """

    version: int
    metadata: Mapping[str, GgufValue]
    tensors: tuple[GgufTensor, ...]
    table_end: int
    data_offset: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file. Any file needs less than 64 MiB of memory.

    Raises:
        InvalidInput: The file is missing, truncated or longer than it declares, its header is inconsistent or exceeds a
            limit, or it has a version or a type that this reader does not know.
    """
    try:
        with open_buffered(path) as file:
            return parse_gguf_header(file, os.fstat(file.fileno()).st_size, path)
    except FileNotFoundError:
        raise InvalidInput(str(path), found="the file does not exist", expected="a GGUF file") from None
    except OSError as error:
        raise InvalidInput(
            str(path), found=f"the file cannot be read: {error.strerror}", remedy="check the disk and the permissions"
        ) from None


def parse_gguf_header(file: BinaryIO, size: int, path: Path) -> GgufHeader:
    """Return the header of an open file of ``size`` bytes. ``path`` names it in messages.

    The errors are those of :func:`read_gguf_header`. Only the header is read.
    """
    cursor = _Cursor(file, size, path)
    magic = cursor.take(min(4, size), "")
    if magic != b"GGUF":
        cursor.fail("", f"the file begins with {magic!r}", "a GGUF file, which begins with b'GGUF'")
    version = cursor.number("<I", "version")
    if version not in _VERSIONS:
        cursor.fail("version", f"version {version}", "version 2 or 3, little-endian", _UNKNOWN)
    tensor_count = cursor.count("number of tensors", MAX_TENSORS)
    metadata = _read_metadata(cursor, cursor.count("number of metadata entries", _MAX_ENTRIES))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        cursor.fail("general.alignment", f"{alignment!r:.60}", "a power of two")
    entries = [_read_entry(cursor, number) for number in range(tensor_count)]
    data_offset = -(-cursor.position // alignment) * alignment
    names: set[str] = set()
    tensors = []
    end = padded_end = data_offset
    for name, code, shape, relative in entries:
        if name in names:
            cursor.fail(name, "the table contains the tensor twice", "unique names")
        names.add(name)
        type_name, block_size, block_bytes = _TENSOR_TYPES[code]
        tensor = GgufTensor(
            name, type_name, shape, data_offset + relative, math.prod(shape) // block_size * block_bytes
        )
        if tensor.offset != padded_end:
            kind = "it overlaps the previous tensor" if tensor.offset < padded_end else "there is a gap before it"
            cursor.fail(name, f"offset {relative}: {kind}", f"offset {padded_end - data_offset}")
        end = tensor.offset + tensor.nbytes
        padded_end = -(-end // alignment) * alignment
        tensors.append(tensor)
    if not tensors:
        end = min(size, data_offset)  # a file without tensors may end before the padding
    if not end <= size <= padded_end:
        kind = "the file is truncated" if size < end else "the file is longer than its header declares"
        last = next((tensor.name for tensor in tensors if tensor.offset + tensor.nbytes > size), "")
        cursor.fail(last, f"{kind}: {size} bytes", f"{padded_end} bytes")
    return GgufHeader(version, MappingProxyType(metadata), tuple(tensors), cursor.position, data_offset)


class _Cursor:
    """Position in a header. Every length is compared with the size of the file and the limits before it is used."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._size, self._path = file, size, path
        self.position = 0
        self._text_bytes = 0

    def fail(self, field: str, found: str, expected: str, remedy: str = _DAMAGED) -> NoReturn:
        """Raise InvalidInput for a field of the header, or for the file if ``field`` is empty."""
        location = f"{self._path}: {field}" if field else str(self._path)
        raise InvalidInput(location, found=found, expected=expected, remedy=remedy)

    def require(self, length: int, field: str) -> None:
        """Raise InvalidInput if the file or the largest header has fewer than ``length`` further bytes."""
        left = min(self._size, MAX_HEADER_BYTES) - self.position
        if length > left:
            end = "the file" if self._size <= MAX_HEADER_BYTES else f"the largest header ({MAX_HEADER_BYTES} bytes)"
            self.fail(field, f"{length} bytes at byte {self.position}", f"at most {left} bytes, where {end} ends")

    def take(self, length: int, field: str) -> bytes:
        """Return the next ``length`` bytes."""
        self.require(length, field)
        content = self._file.read(length)
        if len(content) < length:
            self.fail(field, f"the file ends at byte {self.position + len(content)}", f"{self._size} bytes, as before")
        self.position += length
        return content

    def number(self, number_format: str, field: str) -> int:
        """Return the next whole number."""
        value: int = struct.unpack(number_format, self.take(struct.calcsize(number_format), field))[0]
        return value

    def count(self, field: str, most: int) -> int:
        """Return the next number, which must not exceed ``most``."""
        value = self.number("<Q", field)
        if value > most:
            self.fail(field, str(value), f"at most {most}")
        return value

    def text(self, field: str, most: int = _MAX_TEXT_BYTES) -> str:
        """Return the next text, which has at most ``most`` bytes."""
        content = self.take(self.count(f"{field}: length", most), field)
        self._text_bytes += len(content)
        if self._text_bytes > _MAX_TEXT_BYTES:
            self.fail(field, f"more than {_MAX_TEXT_BYTES} bytes of text", "a smaller header")
        try:
            return content.decode()
        except UnicodeDecodeError:
            self.fail(field, f"{content[:40]!r}", "text in UTF-8")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for number in range(count):
        key = cursor.text(f"metadata {number}: key", 65_535)
        if key in metadata:
            cursor.fail(key, "the metadata contain the key twice", "unique keys")
        code = cursor.number("<I", f"{key}: type")
        metadata[key] = _read_array(cursor, key) if code == _ARRAY else _read_value(cursor, key, code)
    return metadata


def _read_value(cursor: _Cursor, key: str, code: int) -> str | int | float | bool:
    if code == _TEXT:
        return cursor.text(key)
    if code not in _NUMBERS:
        cursor.fail(key, f"the value type {code}", "a type of GGUF: 0 to 12", _UNKNOWN)
    name, number_format = _NUMBERS[code]
    value: int | float = struct.unpack(number_format, cursor.take(struct.calcsize(number_format), key))[0]
    if name == "bool":
        if value not in (0, 1):
            cursor.fail(key, f"a bool with the value {value}", "0 or 1")
        return bool(value)
    return value


def _read_array(cursor: _Cursor, key: str) -> GgufArray:
    code = cursor.number("<I", f"{key}: type of the items")
    digest = hashlib.sha256()
    if code == _TEXT:
        count = cursor.count(f"{key}: number of items", _MAX_ITEMS)
        cursor.require(8 * count, key)
        for number in range(count):
            length = cursor.count(f"{key}[{number}]: length", _MAX_ITEM_BYTES)
            digest.update(struct.pack("<Q", length) + cursor.take(length, key))
        return GgufArray("string", count, digest.hexdigest())
    if code not in _NUMBERS:
        cursor.fail(key, f"an array with items of the type {code}", "an array of numbers or of texts", _UNKNOWN)
    name, number_format = _NUMBERS[code]
    count = cursor.count(f"{key}: number of items", MAX_HEADER_BYTES)
    left = count * struct.calcsize(number_format)
    cursor.require(left, key)
    while left:
        chunk = cursor.take(min(left, _CHUNK_BYTES), key)
        digest.update(chunk)
        left -= len(chunk)
    return GgufArray(name, count, digest.hexdigest())


def _read_entry(cursor: _Cursor, number: int) -> tuple[str, int, tuple[int, ...], int]:
    """Return name, code of the type, shape and offset of the next tensor in the table."""
    name = cursor.text(f"tensor {number}: name", _MAX_NAME_BYTES)
    dimensions = cursor.number("<I", f"{name}: number of dimensions")
    if dimensions > _MAX_DIMENSIONS:
        cursor.fail(name, f"{dimensions} dimensions", f"at most {_MAX_DIMENSIONS}")
    stored = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, f"{name}: shape"))
    if math.prod(max(size, 1) for size in stored) >= 2**63:
        cursor.fail(name, f"shape {list(stored)}", "fewer than 2^63 elements")
    code = cursor.number("<I", f"{name}: type")
    if code not in _TENSOR_TYPES:
        cursor.fail(name, f"the tensor type {code}", "a type of llama.cpp, such as 8 (Q8_0)", _UNKNOWN)
    type_name, block_size, _ = _TENSOR_TYPES[code]
    if (stored[0] if stored else 1) % block_size:
        row = stored[0] if stored else 1
        cursor.fail(name, f"rows of {row} elements of {type_name}", f"a multiple of {block_size}, the size of a block")
    return name, code, stored[::-1], cursor.number("<Q", f"{name}: offset")

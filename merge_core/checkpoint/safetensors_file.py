"""Read untrusted safetensors files: parse headers strictly, and read exact byte ranges into existing memory.

A file consists of the header length (8 bytes, little-endian), a JSON header ``{name: {dtype, shape, data_offsets}}``,
and the bytes of the tensors without gaps (https://huggingface.co/docs/safetensors, "Format"). A header is refused if
its offsets overlap, leave the file, decrease, or disagree with a shape.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint.tensors import BY_CODE, DType, StoredTensor
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import JsonBounds, open_plain, parse_json
from mergegate.merge_core.system import read_at

# The format allows headers of 100 MB, but their table of tensors would take 1.5 GB of memory. The longest real headers
# (of shards that list the experts of a mixture separately) have a few MB.
MAX_HEADER_BYTES = 32_000_000
MAX_TENSORS = 200_000
_BOUNDS = JsonBounds(size=MAX_HEADER_BYTES, values=8 * MAX_TENSORS, depth=8)
_MAX_DIMENSIONS = 64
_KEYS = {"dtype", "shape", "data_offsets"}
_DAMAGED = "download or copy the file again. It is damaged, or safetensors did not write it"


def read_header(path: Path, *, within: Path | None = None) -> tuple[StoredTensor, ...]:
    """Return the tensors of a file in the order of their bytes. Only the header is read.

    If ``within`` is set, that directory must contain the file after all links are resolved.

    Raises:
        InvalidInput: The file is missing or truncated, or its header is inconsistent (see the module docstring).
    """
    try:
        with open_plain(path, within=within) as file:
            fd = file.fileno()
            return fetch_header(lambda start, count: os.pread(fd, count, start), os.fstat(fd).st_size, path)
    except FileNotFoundError:
        raise InvalidInput(str(path), found="the file does not exist", expected="a safetensors file") from None
    except OSError as error:
        raise InvalidInput(
            str(path), found=f"the file cannot be read: {error.strerror}", remedy="check the disk and the permissions"
        ) from None


def fetch_header(read: Callable[[int, int], bytes], size: int, path: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors of a file that is read through a callback, for example over the network.

    Args:
        read: Function that takes a position and a number of bytes, and returns these bytes. Only the header is read.
        size: Size of the file in bytes.
        path: Path that the tensors and error messages name.
    """
    if size < 8:
        raise _damaged(str(path), found=f"{size} bytes", expected="a safetensors file")
    length = int.from_bytes(read(0, 8), "little")
    if length > MAX_HEADER_BYTES or length > size - 8:
        raise _damaged(
            str(path),
            found=f"a header of {length} bytes in a file of {size}",
            expected=f"a header within the file, of at most {MAX_HEADER_BYTES} bytes",
        )
    return parse_header(read(8, length), file_size=size, path=path)


def parse_header(text: bytes, *, file_size: int, path: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors that the JSON header ``text`` describes, in the order of their bytes.

    Raises:
        InvalidInput: The header is not JSON, a name occurs twice, a format is unknown, or the tensors do not cover the
            data of a file of ``file_size`` bytes exactly.
    """
    data_start = 8 + len(text)
    located: list[tuple[int, int, StoredTensor]] = []  # Offset, number of bytes, tensor.
    for name, entry in _json_object(text, path).items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
                raise InvalidInput(f"{path}: __metadata__", found=f"{entry!r:.80}", expected="text keys and values")
            continue
        dtype, shape, start, stop = _entry(entry, path, name)
        # Parents have the same tensor names, so interning stores each name only once.
        tensor = StoredTensor(sys.intern(name), path, dtype, shape, data_start + start)
        nbytes = tensor.nbytes
        if stop - start != nbytes:
            raise _damaged(
                f"{path}: {name}",
                found=f"{stop - start} bytes for shape {list(shape)} of {dtype.code}",
                expected=f"{nbytes} bytes",
            )
        located.append((tensor.offset, nbytes, tensor))
    # An empty tensor has the same offset as the next tensor and must come before it.
    located.sort(key=itemgetter(0, 1))
    end = data_start
    for offset, nbytes, tensor in located:
        if offset != end:
            kind = "it overlaps the previous tensor" if offset < end else "there is a gap before it"
            raise _damaged(f"{path}: {tensor.name}", found=kind, expected="adjacent tensors")
        end += nbytes
    if end != file_size:
        kind = "the file is truncated" if end > file_size else "the file is longer than its header declares"
        raise _damaged(str(path), found=f"{kind}: {file_size} bytes", expected=f"{end} bytes")
    return tuple(tensor for _, _, tensor in located)


def read_into(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill ``buffer`` with the bytes of the open file ``fd`` from ``offset`` on. Threads may share ``fd``."""
    filled = 0
    while filled < len(buffer):
        try:
            count = read_at(fd, buffer[filled:], offset + filled)
        except OSError as error:
            raise InvalidInput(
                str(path), found=f"byte {offset + filled} cannot be read: {error.strerror}", remedy="check the disk"
            ) from None
        if count == 0:
            raise _damaged(
                str(path),
                found=f"the file ends at byte {offset + filled}",
                expected=f"at least {offset + len(buffer)} bytes",
            )
        filled += count


def render_header(tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the header, including the length prefix, of a file with ``tensors`` in this order.

    Each entry of ``tensors`` consists of name, dtype code, shape and number of bytes. Spaces pad the header so that the
    data starts at a multiple of 8, as the specification recommends.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, code, shape, nbytes in tensors:
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _json_object(text: bytes, path: Path) -> dict[str, Any]:
    objects = 0

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal objects
        objects += 1
        if objects > MAX_TENSORS + 2:  # Two more objects: the header itself and its metadata.
            raise InvalidInput(
                str(path),
                found=f"more than {MAX_TENSORS} tensors",
                expected=f"at most {MAX_TENSORS} tensors in one file",
            )
        result = dict(pairs)
        if len(result) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            duplicate = next(key for key, count in counts.items() if count > 1)
            raise _damaged(f"{path}: {duplicate}", found="the header contains the name twice")
        return result

    header = parse_json(text, f"{path}: header", bounds=_BOUNDS, pairs=unique, expected="JSON, as in safetensors")
    if not isinstance(header, dict):
        raise _damaged(str(path), found="the header is not a JSON object")
    return header


def _entry(entry: Any, path: Path, name: str) -> tuple[DType, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise _damaged(f"{path}: {name}", found=f"{entry!r:.80}", expected="dtype, shape and data_offsets")
    dtype = BY_CODE.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise InvalidInput(
            f"{path}: {name}", found=f"dtype {entry['dtype']!r:.40}", expected=f"one of {', '.join(BY_CODE)}"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_naturals(shape) or not _are_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(
            f"{path}: {name}",
            found=f"shape {shape!r:.60}, data_offsets {offsets!r:.60}",
            expected="whole numbers from 0, with ascending offsets",
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_naturals(value: Any) -> bool:
    # 2**63 bounds the size of a file and the later arithmetic. bool is an int in Python, but not in JSON.
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return False
    for item in value:  # noqa: SIM110  # Twice as fast as all() for half a million numbers.
        if type(item) is not int or not 0 <= item < 2**63:
            return False
    return True


def _damaged(location: str, found: str, expected: str = "") -> InvalidInput:
    return InvalidInput(location, found=found, expected=expected, remedy=_DAMAGED)

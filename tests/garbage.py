"""Damage a state file in the ways that occur in practice: invalid content, or something other than a regular file."""

from __future__ import annotations

import copy
import math
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from hypothesis import strategies as st


def _cleared(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as server:
        before = Path.cwd()
        os.chdir(_cleared(path).parent)  # A socket path is limited to 107 characters.
        try:
            server.bind(path.name)
        finally:
            os.chdir(before)


def _directory(path: Path) -> None:
    (_cleared(path) / "inside").mkdir(parents=True)
    (path / "inside" / "file").write_bytes(b"x")


def _truncated(path: Path) -> None:
    content = path.read_bytes() if path.is_file() else b"half"
    _cleared(path).write_bytes(content[: len(content) // 2])


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes() if path.is_file() else b"content")
    content[len(content) // 2 :: 97] = bytes(byte ^ 0x55 for byte in content[len(content) // 2 :: 97])
    _cleared(path).write_bytes(content)


def _content(content: bytes) -> Callable[[Path], None]:
    return lambda path: _cleared(path).write_bytes(content) and None


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: _cleared(path).write_bytes(b"") and None, "garbage": _content(bytes(range(256)) * 40),
    "zeros": _content(bytes(8192)), "truncated": _truncated, "altered": _flipped, "null": _content(b"null"),
    "a list": _content(b'[1, {"files": []}]'),
    "an older schema": _content(b'{"version": 0, "files": [], "key": 3, "value": {}}'),
    "deep": _content(b"[" * 200_000), "a number without end": _content(b"9" * 10_000),
    "not text": _content(b'{"key": "\xff\xfe\xed\xa0\x80"}'), "a directory": _directory,
    "a loop of links": lambda path: _cleared(path).symlink_to(path.name),
    "a link to nowhere": lambda path: _cleared(path).symlink_to("nowhere"),
    "a device": lambda path: _cleared(path).symlink_to("/dev/zero"), "a pipe": lambda path: os.mkfifo(_cleared(path)),
    "a socket": _socket, "unreadable": lambda path: path.chmod(0) if path.exists() else None,
}  # fmt: skip

CONTENT = st.binary(max_size=400) | st.sampled_from([b"null", b"[]", b"{}", b'""', b"0", b"[" * 5000, b"9" * 5000])


# One value of each JSON type, and numbers out of every field's range.
OTHER_VALUES = (None, True, False, "x", "", 5, -1, 0.5, 2**70, -(2**70), 1e308, math.inf, math.nan, [], ["x"], {})
OTHER_VALUES += ({"x": 1},)
Keys: TypeAlias = tuple[str | int, ...]


def values_in(value: Any, skipped: Collection[str] = (), keys: Keys = ()) -> Iterator[Keys]:
    """Yield the path of keys to every value in plain data, except below the keys in ``skipped``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key not in skipped:
            yield (*keys, key)
            yield from values_in(inner, skipped, (*keys, key))


def with_value(content: Any, keys: Keys, value: object) -> Any:
    """Return plain data with the value at ``keys`` replaced."""
    changed = copy.deepcopy(content)
    inner = changed
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return changed

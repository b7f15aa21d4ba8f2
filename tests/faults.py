"""Simulate disks that fail at the n-th call: count the write-related system calls and make them fail from there on.

::

    with disk_fails(at=None) as calls: work()        # counts
    with disk_fails(at=7, number=errno.ENOSPC): ...  # the seventh call and all after it fail; reading still works
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = (
    "write", "pwrite", "fsync", "fdatasync", "rename", "replace", "mkdir", "ftruncate", "posix_fallocate", "symlink",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Counter:
    """Counter of the calls, with the name of the first call that failed."""

    def __init__(self, at: int | None, number: int, once: bool) -> None:
        self.count, self.failed = 0, ""
        self._at, self._number, self._once, self._lock = at, number, once, threading.Lock()

    def step(self, name: str, path: object) -> None:
        with self._lock:
            self.count += 1
            if self._at is None or self.count < self._at or (self._once and self.failed):
                return
            self.failed = self.failed or name
        where = path if isinstance(path, (str, bytes, os.PathLike)) else None
        raise OSError(self._number, os.strerror(self._number), where and os.fspath(where))


class _Writing(io.FileIO):
    """A raw file whose writes are counted."""

    before: Callable[[str, object], None]

    def write(self, data: Any) -> int | None:
        self.before("file.write", self.name)
        return super().write(data)


@contextmanager
def disk_calls(
    before: Callable[[str, object], None],
    after: Callable[[str, Any], None] = lambda name, first: None,
    names: Iterable[str] = CALLS,
) -> Iterator[None]:
    """Call `before` and `after` with name and first argument around each call that changes the disk."""
    real_open, open_python = os.open, io.open

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any, **kwargs: Any) -> Any:
            before(name, args[0] if args else None)
            done = call(*args, **kwargs)
            after(name, args[0] if args else None)
            return done

        return calling

    def open_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & _WRITING:
            before("open", path)
        return real_open(path, flags, *args, **kwargs)

    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and isinstance(file, (str, bytes, os.PathLike)):
            before("open", file)
            raw = _Writing(file, mode.replace("b", "").replace("t", ""))
            raw.before = before
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=kwargs.get("encoding") or "utf-8")
        return open_python(file, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        patch.setattr(os, "open", open_descriptor)
        patch.setattr(io, "open", open_file)
        yield


@contextmanager
def disk_fails(at: int | None, number: int = 28, *, once: bool = False) -> Iterator[Counter]:
    """Make call number `at` (from 1) fail with errno `number` inside the block, and all later calls unless `once`."""
    counter = Counter(at, number, once)
    with disk_calls(counter.step):
        yield counter


def files_below(directory: Path) -> dict[str, bytes]:
    """Return the content of every file by its relative name."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}

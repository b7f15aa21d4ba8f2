"""Power that goes: a program dies at its n-th call that writes, and of what it wrote stays what a disk has promised.

::

    with power(root) as disk: work()                            # counts the calls: disk.count
    with power(root, at=7) as disk, suppress(PowerCut): work()  # nothing of the seventh and of what follows happens
    disk.restore(tmp_path / "after", names_survive=True)

A file's bytes are promised by fsync(2) of the file, its name by fsync of the directory. Beyond that a disk may keep or
drop what it likes; the two ends of that are tried. ``names_survive``: every name as it was at the cut, and of bytes
only those that were flushed (a rename overtakes the data; the rest of the file is gone). Otherwise: names, too, only as
they were flushed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults import CALLS

REMOVING = ("unlink", "remove", "rmdir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class PowerCut(BaseException):
    """Nothing catches it, as nothing catches the end of a process."""


class Disk:
    """What lies below a directory, and what of it was flushed. Everything that is there in the beginning is.

    Attributes:
        count: Calls so far.
    """

    def __init__(self, root: Path, at: int | None) -> None:
        self.count, self._root, self._at = 0, root, at
        self._held: list[int] = []  # flushed files stay open, so that no other gets their number
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, str]]] = {}  # of a directory: number and kind of each entry
        self._flush(os.open(root, os.O_RDONLY))
        for place in root.rglob("*"):
            if not place.is_symlink():
                self._flush(os.open(place, os.O_RDONLY))

    def step(self) -> None:
        """One call more. Raises ``PowerCut`` from the chosen one on."""
        self.count += 1
        if self._at is not None and self.count >= self._at:
            raise PowerCut

    def flushed(self, descriptor: int) -> None:
        """What an fsync of it promises."""
        self._flush(os.dup(descriptor))

    def restore(self, into: Path, *, names_survive: bool) -> None:
        """Make in ``into`` what the next start of the machine finds."""
        into.mkdir()
        if names_survive:
            self._as_named(self._root, into)
        else:
            self._as_flushed(self._root.stat().st_ino, into)
        for descriptor in self._held:
            os.close(descriptor)

    def _flush(self, descriptor: int) -> None:
        self._held.append(descriptor)
        number = os.fstat(descriptor).st_ino
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112  # of what is open
            entries = {}
            for entry in os.scandir(descriptor):
                kind = "link " + os.readlink(entry.name, dir_fd=descriptor) if entry.is_symlink() else ""
                is_directory = entry.is_dir(follow_symlinks=False)
                entries[entry.name] = (entry.inode(), kind or ("directory" if is_directory else "file"))
            self._names[number] = entries
        else:
            self._bytes[number] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _as_named(self, place: Path, into: Path) -> None:
        for one in place.iterdir():
            if one.is_symlink():
                (into / one.name).symlink_to(one.readlink())
            elif one.is_dir():
                (into / one.name).mkdir()
                self._as_named(one, into / one.name)
            else:
                (into / one.name).write_bytes(self._bytes.get(one.stat().st_ino, b""))

    def _as_flushed(self, directory: int, into: Path) -> None:
        for name, (number, kind) in self._names.get(directory, {}).items():
            if kind == "directory":
                (into / name).mkdir()
                self._as_flushed(number, into / name)
            elif kind == "file":
                (into / name).write_bytes(self._bytes.get(number, b""))
            else:
                (into / name).symlink_to(kind.removeprefix("link "))


class _Writing(io.FileIO):
    """A raw file whose writes are counted."""

    disk: Disk

    def write(self, data: Any) -> int | None:
        self.disk.step()
        return super().write(data)


@contextmanager
def power(root: Path, at: int | None = None) -> Iterator[Disk]:
    """Inside the block calls are counted and flushes noted; from call ``at`` (from 1) on nothing is done any more."""
    disk, real_open, open_python = Disk(root, at), os.open, io.open

    def counted(call: Callable[..., Any], *, flushes: bool) -> Callable[..., Any]:
        def calling(*args: Any, **kwargs: Any) -> Any:
            disk.step()
            done = call(*args, **kwargs)
            if flushes:
                disk.flushed(args[0])
            return done

        return calling

    def open_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & _WRITING:
            disk.step()
        return real_open(path, flags, *args, **kwargs)

    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and isinstance(file, (str, bytes, os.PathLike)):
            disk.step()
            raw = _Writing(file, mode.replace("b", "").replace("t", ""))
            raw.disk = disk
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=kwargs.get("encoding") or "utf-8")
        return open_python(file, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in (*CALLS, *REMOVING):
            patch.setattr(os, name, counted(getattr(os, name), flushes=name in ("fsync", "fdatasync")))
        patch.setattr(os, "open", open_descriptor)
        patch.setattr(io, "open", open_file)
        yield disk

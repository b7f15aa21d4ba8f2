"""Simulate power cuts: a program dies at its n-th write call, and only flushed data survives.

::

    with power(root) as disk: work()                            # counts the calls: disk.count
    with power(root, at=7) as disk, suppress(PowerCut): work()  # the seventh call and all later ones do not happen
    disk.restore(tmp_path / "after", names_survive=True)

fsync(2) of a file promises its bytes, and fsync of the directory promises its name. Beyond that, a disk may keep or
drop anything. The tests try both extremes. With ``names_survive``, every name is as it was at the cut, but only flushed
bytes survive (a rename overtakes the data, and the rest of the file is lost). Without it, names too are only as they
were when last flushed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults import CALLS, disk_calls

REMOVING = ("unlink", "remove", "rmdir")


class PowerCut(BaseException):
    """The simulated power cut; a `BaseException`, so that product code does not catch it."""


class Disk:
    """The content of a directory and the part of it that was flushed; the initial content counts as flushed.

    Attributes:
        count: Calls so far.
    """

    def __init__(self, root: Path, at: int | None) -> None:
        self.count, self._root, self._at = 0, root, at
        self._held: list[int] = []  # Flushed files stay open, so that their inode numbers are not reused.
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, str]]] = {}  # Directory inode to the inode and kind of each entry.
        self._flush(os.open(root, os.O_RDONLY))
        for place in root.rglob("*"):
            if not place.is_symlink():
                self._flush(os.open(place, os.O_RDONLY))

    def step(self) -> None:
        """Count one call, and raise `PowerCut` from the selected call on."""
        self.count += 1
        if self._at is not None and self.count >= self._at:
            raise PowerCut

    def flushed(self, descriptor: int) -> None:
        """Record what an fsync of `descriptor` promises."""
        self._flush(os.dup(descriptor))

    def restore(self, into: Path, *, names_survive: bool) -> None:
        """Create in `into` the state that the machine finds at its next start."""
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


@contextmanager
def power(root: Path, at: int | None = None) -> Iterator[Disk]:
    """Count calls and record flushes inside the block; from call `at` (from 1) on, no call takes effect."""
    disk = Disk(root, at)

    def after(name: str, descriptor: int) -> None:
        if name in ("fsync", "fdatasync"):
            disk.flushed(descriptor)

    with disk_calls(lambda name, path: disk.step(), after, (*CALLS, *REMOVING)):
        yield disk

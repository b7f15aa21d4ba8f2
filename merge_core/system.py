"""What only Linux has, asked for in one place: each call with what is done where it is not there; and what its kernel
says of the machine.

Merging needs none of it to be right. Where a call is absent (macOS, the BSDs), reading is less far ahead, a full disk
is found while writing, a step of a chain lies in a temporary file instead of memory. What needs Linux and has no other
way is refused where a child process is begun (``tasks/sandbox/linux.py``).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mergegate.merge_core.errors import Refused

_CACHESTAT = 451  # of every processor but one
_CONTROL_GROUPS = Path("/sys/fs/cgroup")  # absent elsewhere


def require_posix(kind: str) -> None:
    """Locks, descriptors and flags of opening are POSIX's everywhere in this project, and have no stand-in.

    Args:
        kind: ``os.name``.

    Raises:
        Refused: on any other system.
    """
    if kind != "posix":
        raise Refused(
            "this system",
            found=f"os.name {kind!r}",
            expected="Linux; to plan and merge, any POSIX system",
            remedy="run it in WSL or in a container (containers/ has the image)",
        )


def cores_of_process() -> int:
    """Cores that this process may use; elsewhere, those that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_at(fd: int, into: memoryview, offset: int) -> int:
    """Read from ``offset`` of an open file into memory that is there; returns how many bytes came."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    found = os.pread(fd, len(into), offset)
    into[: len(found)] = found
    return len(found)


def read_soon(fd: int, start: int, count: int) -> bool:
    """Have the system read a part of a file into its cache, without waiting; False where it takes no such advice."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with suppress(OSError):  # It is advice: reading will find out what is wrong.
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_WILLNEED)
    return True


def forget_cached(fd: int, start: int = 0, count: int = 0) -> None:
    """Have the system drop what it keeps of a part of a file (0 bytes: to its end); elsewhere it keeps it.

    What somebody has mapped stays, and so does what is not on the disk yet.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # It is advice.
            os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)


def cached_bytes(fd: int, start: int, count: int) -> int | None:
    """How much of a part of a file lies in the system's cache; None where it does not tell (Linux before 6.5).

    Source: cachestat(2).
    """
    if sys.platform != "linux":
        return None
    asked, told = (ctypes.c_uint64 * 2)(start, count), (ctypes.c_uint64 * 5)()
    failed: int = _libc().syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(told), 0)
    return None if failed else told[0] * mmap.PAGESIZE


def available_memory() -> int:
    """Bytes that could be had without swapping; where the system does not say, half of what there is."""
    memory = system_memory()
    return memory.available if memory else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass(frozen=True)
class Capacity:
    """Bytes of one kind of memory."""

    total: int
    available: int


def system_memory() -> Capacity | None:
    """Of this system, or of what a container or a service leaves of it to this process; None where the system does not
    say."""
    if not (lines := kernel_lines("meminfo")):
        return None
    sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    found = Capacity(sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"]))
    for group in filter(None, map(control_group, control_groups())):
        found = Capacity(min(found.total, group.total), min(found.available, group.available))
    return found


def control_groups(place: Path = _CONTROL_GROUPS, own: Sequence[str] | None = None) -> tuple[Path, ...]:
    """The control groups (cgroup version 2) that this process is in, from its own to the outermost: each has a limit of
    its own, or none.

    Args:
        place: Where the system shows them; a container sees its own as the outermost.
        own: Lines of ``/proc/self/cgroup``; None: read there.
    """
    lines = kernel_lines("self/cgroup") if own is None else own
    inside = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    parts = Path(inside).parts
    if ".." in parts:  # Of a process that was begun outside of what is shown here.
        parts = ()
    return tuple(place.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))


def control_group(place: Path) -> Capacity | None:
    """The limit of one; None without."""
    try:
        limit = int((place / "memory.max").read_text())
        used = int((place / "memory.current").read_text())
        numbers = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such limit, or "max"
        return None
    # Cached files count as used, and go when memory is asked for.
    cached = int(numbers.get("inactive_file", 0)) + int(numbers.get("active_file", 0))
    return Capacity(limit, max(0, min(limit, limit - used + cached)))


def kernel_lines(name: str) -> list[str]:
    """What the kernel says under ``/proc``: ``meminfo``, ``cpuinfo``. None elsewhere."""
    try:
        return (Path("/proc") / name).read_text(errors="replace").splitlines()
    except OSError:
        return []


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def open_uncached(path: Path) -> int:
    """Open a file to be read past the cache, with offsets, sizes and addresses that are multiples of the disk's
    sectors; through the cache where file or system know no such reads."""
    if direct := getattr(os, "O_DIRECT", 0):
        with suppress(OSError):  # Opening it below finds out what is wrong, or that nothing is.
            return os.open(path, os.O_RDONLY | direct)
    return os.open(path, os.O_RDONLY)


def reserve_space(fd: int, size: int) -> None:
    """Find a full disk before any work is done; elsewhere, and on file systems without it, writing finds out.

    Raises:
        OSError: when there is no room.
    """
    allocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
    if allocate is None or size == 0:
        return
    try:
        allocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def nameless_file(label: str) -> int:
    """A file without a name, open: in memory, elsewhere a temporary one.

    Args:
        label: What the system calls it where somebody looks.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def prefer_large_pages(memory: mmap.mmap) -> None:
    """Ask for large pages; without them it is only slower."""
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def flush_data(fd: int) -> None:
    """What was written is on the disk, with the length of the file; elsewhere, with all that is known of it."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def boot_id() -> str:
    """Of this start of the system: what was not on the disk is gone after another. Empty where nothing tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

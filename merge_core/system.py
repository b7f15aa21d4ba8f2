"""Wrap the system calls that only Linux has, with a fallback for other systems, and read facts from the Linux kernel.

Merging does not need any of them for correct results. On systems without a call (macOS, the BSDs), read-ahead is
shorter, a full disk is only detected while writing, and intermediate results of a chain are in a temporary file instead
of memory. Features that need Linux and have no fallback are refused when a child process starts
(``tasks/sandbox/preparation.py``).
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

_CACHESTAT = 451  # the same number on every architecture but one
_CONTROL_GROUPS = Path("/sys/fs/cgroup")  # only on Linux


def require_posix(kind: str) -> None:
    """Refuse to run on a system without POSIX locks, file descriptors and flags for opening files.

    The whole project relies on them, and there is no fallback.

    Args:
        kind: ``os.name``.

    Raises:
        Refused: The system is not POSIX.
    """
    if kind != "posix":
        raise Refused(
            "this system",
            found=f"os.name {kind!r}",
            expected="Linux; to plan and merge, any POSIX system",
            remedy="run it in WSL or in a container (containers/ has the image)",
        )


def cores_of_process() -> int:
    """Return the number of cores that this process may use, or of all cores if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_at(fd: int, into: memoryview, offset: int) -> int:
    """Read bytes of an open file into existing memory, without moving the position of the file.

    Args:
        fd: Descriptor of the file.
        into: Memory that receives the bytes. Its length is the largest number of bytes to read.
        offset: Position of the first byte in the file.

    Returns:
        Number of bytes that were read. It can be less than the length of ``into``, and is 0 at the end of the file.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    data = os.pread(fd, len(into), offset)
    into[: len(data)] = data
    return len(data)


def read_soon(fd: int, start: int, count: int) -> bool:
    """Ask the system to read a part of a file into its cache, without waiting.

    Returns:
        False if the system does not accept such requests.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    with suppress(OSError):  # A hint only: the read itself will report errors.
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_WILLNEED)
    return True


def forget_cached(fd: int, start: int = 0, count: int = 0) -> None:
    """Ask the system to drop a part of a file from its cache, where it can do so. A ``count`` of 0 means to the end.

    Parts that a process has mapped or that are not on disk yet stay in the cache.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # A hint only.
            os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)


def cached_bytes(fd: int, start: int, count: int) -> int | None:
    """Return how many bytes of a part of a file are in the system's cache, or None if it does not report it.

    Linux reports it from version 6.5 on, by cachestat(2).
    """
    if sys.platform != "linux":
        return None
    byte_range, statistics = (ctypes.c_uint64 * 2)(start, count), (ctypes.c_uint64 * 5)()
    failed: int = _libc().syscall(_CACHESTAT, fd, ctypes.byref(byte_range), ctypes.byref(statistics), 0)
    return None if failed else statistics[0] * mmap.PAGESIZE


def available_memory() -> int:
    """Return the bytes that are available without swapping, or half of all memory if the system does not report it."""
    memory = system_memory()
    return memory.available if memory else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass(frozen=True)
class Capacity:
    """Total and available bytes of memory."""

    total: int
    available: int


def system_memory() -> Capacity | None:
    """Return the memory of the system, limited to the share of the container or service that this process is in.

    Return None if the system does not report it.
    """
    if not (lines := kernel_lines("meminfo")):
        return None
    sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    memory = Capacity(sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"]))
    for group in filter(None, map(control_group, control_groups())):
        memory = Capacity(min(memory.total, group.total), min(memory.available, group.available))
    return memory


def control_groups(root: Path = _CONTROL_GROUPS, groups: Sequence[str] | None = None) -> tuple[Path, ...]:
    """Return the control groups (cgroup version 2) of this process, from its own to the outermost.

    Each may have a limit of its own.

    Args:
        root: Directory where the system lists them. A container sees its own group as the outermost.
        groups: Lines of ``/proc/self/cgroup``. Default: read that file.
    """
    lines = kernel_lines("self/cgroup") if groups is None else groups
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    parts = Path(group).parts
    if ".." in parts:  # The process started outside the groups that are visible here.
        parts = ()
    return tuple(root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))


def control_group(directory: Path) -> Capacity | None:
    """Return the memory limit of one control group, or None if it has none."""
    try:
        limit = int((directory / "memory.max").read_text())
        used = int((directory / "memory.current").read_text())
        numbers = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such limit, or "max"
        return None
    # Cached files count as used, but the kernel frees them when memory is requested.
    cached = int(numbers.get("inactive_file", 0)) + int(numbers.get("active_file", 0))
    return Capacity(limit, max(0, min(limit, limit - used + cached)))


def kernel_lines(name: str) -> list[str]:
    """Return the lines of a file under ``/proc``, such as ``meminfo`` or ``cpuinfo``. Empty on systems without it."""
    try:
        return (Path("/proc") / name).read_text(errors="replace").splitlines()
    except OSError:
        return []


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def open_uncached(path: Path) -> int:
    """Open a file for reads that bypass the cache, or that use it if the file or the system requires it.

    Offsets, sizes and addresses of the reads must be multiples of the disk's sector size.
    """
    if direct := getattr(os, "O_DIRECT", 0):
        with suppress(OSError):  # Opening the file again below reports a real error, if there is one.
            return os.open(path, os.O_RDONLY | direct)
    return os.open(path, os.O_RDONLY)


def reserve_space(fd: int, size: int) -> None:
    """Reserve disk space to detect a full disk before any work is done.

    If the system or the file system does not support it, the error appears while writing.

    Raises:
        OSError: There is not enough space.
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
    """Open a file without a name: in memory if the system supports it, else a temporary file.

    Args:
        label: Name that the system shows for the file in its tools.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def prefer_large_pages(memory: mmap.mmap) -> None:
    """Ask the system for large pages. Without them, access is only slower."""
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def flush_data(fd: int) -> None:
    """Write a file's data and length to disk, or all of its metadata too if the system cannot separate them."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def boot_id() -> str:
    """Return the ID of the current boot of the system, or an empty string if it is not available.

    Data that was not on disk is lost after another boot.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

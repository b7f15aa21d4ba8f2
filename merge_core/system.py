"""Wrap the system calls that only Linux has, with a fallback for other systems, and read facts from the Linux kernel.

The fallbacks give the same results. On systems without a call (macOS, the BSDs), read-ahead is shorter, a full disk is
only detected while writing, and intermediate results of a chain of merges are in a temporary file instead of memory.
Features that need Linux and have no fallback are refused when a child process starts
(``tasks/base/sandbox/supervision.py``).
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

# Sizes, offsets and addresses of uncached reads are multiples of this: no disk has larger sectors.
UNCACHED_ALIGN = 4096
_SYNC_FILE_RANGE_WRITE = 2
_CACHESTAT = 451  # the same number on every architecture but one
_CONTROL_GROUPS = Path("/sys/fs/cgroup")  # only on Linux


def require_posix(kind: str) -> None:
    """Raise Refused unless ``kind``, the value of ``os.name``, is ``posix``.

    mergegate relies on the locks, file descriptors and flags for opening files of POSIX systems.
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
    """Read bytes of an open file from ``offset`` on into existing memory, without moving the file position.

    Returns:
        Number of bytes that were read. It can be less than the length of ``into``, and is 0 at the end of the file.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    data = os.pread(fd, len(into), offset)
    into[: len(data)] = data
    return len(data)


def read_uncached(fd: int, into: memoryview, offset: int) -> int:
    """Read bytes of an open file from ``offset`` on into existing memory, without a copy in the system's cache.

    Offset, size and address must be multiples of ``UNCACHED_ALIGN``.

    Returns:
        Number of bytes that were read. It is 0 if the system or the file does not support such reads.
    """
    if not (hasattr(os, "O_DIRECT") and hasattr(os, "preadv")):
        return 0
    with suppress(OSError):  # The caller reads through the cache instead, which reports real errors.
        direct_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            return os.preadv(direct_fd, [into], offset)
        finally:
            os.close(direct_fd)
    return 0


def read_soon(fd: int, start: int, count: int) -> bool:
    """Ask the system to read ``count`` bytes of a file into its cache soon, and return without waiting.

    Returns:
        False if the system does not accept such requests.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    with suppress(OSError):  # A hint only: the read itself will report errors.
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_WILLNEED)
    return True


def write_soon(fd: int, start: int, count: int) -> None:
    """Ask the system to start to write ``count`` cached bytes of a file to the disk, and return without waiting."""
    if sys.platform == "linux":  # A hint only, so errors do not matter.
        _libc().sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def forget_cached(fd: int, start: int = 0, count: int = 0) -> None:
    """Ask the system to drop ``count`` bytes of a file from its cache. A count of 0 means all bytes to the end.

    Bytes that a process has mapped into memory or that are not on disk yet stay in the cache.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # A hint only.
            os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)


def cached_bytes(fd: int, start: int, count: int) -> int | None:
    """Return how many of ``count`` bytes of a file are in the system's cache, or None if this is unknown.

    Linux reports the number from version 6.5 on, by cachestat(2).
    """
    if sys.platform != "linux":
        return None
    byte_range, statistics = (ctypes.c_uint64 * 2)(start, count), (ctypes.c_uint64 * 5)()
    failed: int = _libc().syscall(_CACHESTAT, fd, ctypes.byref(byte_range), ctypes.byref(statistics), 0)
    return None if failed else statistics[0] * mmap.PAGESIZE


def available_memory() -> int:
    """Return the available memory in bytes, or half of all memory if the system does not report it."""
    memory = system_memory()
    return memory.available if memory else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass(frozen=True)
class Capacity:
    """Total and available memory in bytes."""

    total: int
    available: int


def system_memory() -> Capacity | None:
    """Return the memory of the system, or None if the system does not report it.

    If a container or service limits the memory of this process, the limit applies.
    """
    if not (lines := kernel_lines("meminfo")):
        return None
    sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    memory = Capacity(sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"]))
    for group in filter(None, map(control_group, control_groups())):
        memory = Capacity(min(memory.total, group.total), min(memory.available, group.available))
    return memory


def data_limit() -> int | None:
    """Return the limit on the memory of this process, in bytes. None: there is no limit, or the system has none."""
    try:
        import resource
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if limit == resource.RLIM_INFINITY else limit


def control_groups(root: Path = _CONTROL_GROUPS, groups: Sequence[str] | None = None) -> tuple[Path, ...]:
    """Return the directories of the control groups (cgroup version 2) of this process, from its own to the outermost.

    Each group may have its own limit. In a container, the container's group is the outermost.

    Args:
        root: Directory of all control groups.
        groups: Lines of ``/proc/self/cgroup``. Default: read that file.
    """
    lines = kernel_lines("self/cgroup") if groups is None else groups
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    parts = Path(group).parts
    if ".." in parts:  # The process started outside the groups that are visible here.
        parts = ()
    return tuple(root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))


def control_group(directory: Path) -> Capacity | None:
    """Return the limit and the available memory of the control group in ``directory``, or None without a limit."""
    try:
        limit = int((directory / "memory.max").read_text())
        used = int((directory / "memory.current").read_text())
        numbers = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such limit, or "max"
        return None
    # Cached files count as used, but the kernel frees them when memory is requested.
    cached = int(numbers.get("inactive_file", 0)) + int(numbers.get("active_file", 0))
    return Capacity(limit, max(0, min(limit, limit - used + cached)))


def open_file_limit() -> int:
    """Return the number of files that this process may have open at the same time. Default of an unknown limit: 256."""
    try:
        import resource
    except ImportError:
        return 256
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit


def kernel_lines(name: str) -> list[str]:
    """Return the lines of a file in ``/proc``, such as ``meminfo``, or an empty list on systems without this file."""
    try:
        return (Path("/proc") / name).read_text(errors="replace").splitlines()
    except OSError:
        return []


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def open_uncached(path: Path) -> int:
    """Open a file for reads that bypass the system's cache, if the file and the system support this.

    Offsets, sizes and addresses of the reads must be multiples of the disk's sector size.
    """
    if direct := getattr(os, "O_DIRECT", 0):
        with suppress(OSError):  # Opening the file again below reports a real error, if there is one.
            return os.open(path, os.O_RDONLY | direct)
    return os.open(path, os.O_RDONLY)


def reserve_space(fd: int, size: int) -> None:
    """Reserve ``size`` bytes on the disk for an open file, so that a full disk raises OSError before any work is done.

    On systems and file systems without this feature, the error is raised while the file is written.
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
    """Open a file without a path: in memory if the system supports it, else a temporary file.

    System tools show a file in memory under the name ``label``.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def prefer_large_pages(memory: mmap.mmap) -> None:
    """Ask the system to use large pages for ``memory``, which makes access faster."""
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def flush_data(fd: int) -> None:
    """Flush the data and the length of an open file to the disk."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def product_name() -> str:
    """Return the product name of this machine, which names the cloud of a virtual machine. Empty if it is unknown."""
    try:
        return Path("/sys/class/dmi/id/product_name").read_text().strip()
    except (OSError, ValueError):
        return ""


def boot_id() -> str:
    """Return the ID of the current boot of the system, or an empty string if the system does not report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

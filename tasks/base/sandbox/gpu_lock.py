"""Lock the GPUs of a host, so that each GPU runs one job. A lock is named by the GPU's UUID and ends with its holder.

::

    with acquire_gpus():                                       # all GPUs that this process may see
        ...
    lease = acquire_gpus()                                     # for a child process: held until it, all its children
    SupervisedProcess(..., inherited=lease.descriptors)        # and the lease are gone

The host keeps the locks because a job queue can lose track: when a worker is killed, the processes that it started
continue. A process locks all GPUs that it may see (``CUDA_VISIBLE_DEVICES``), in a fixed order to prevent deadlocks.
All leases of a process share its locks. On a cluster, its scheduler assigns the GPUs instead. Lock files are in a
directory shared by all users of the host (``MERGEGATE_GPU_LOCKS``, or else the system's temporary directory). On a
system without NVIDIA GPUs (no ``/proc/driver/nvidia``), nothing is locked.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mergegate.tasks.base.runners import current_slot, visible_gpus

LOCKS = "MERGEGATE_GPU_LOCKS"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]{4,64})")
_log = logging.getLogger(__name__)


def list_host_gpus(driver: Path = _DRIVER) -> tuple[str, ...]:
    """Return the UUIDs of the host's GPUs in bus order, in which NVML and, for equal GPUs, CUDA number them."""
    uuids = []
    for path in sorted(driver.glob("*/information")):
        with suppress(OSError, UnicodeDecodeError):
            if match := _UUID.search(path.read_text()):
                uuids.append(match[1])
    return tuple(uuids)


def select_gpus(host: Sequence[str], visible: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs of ``host`` that ``visible`` selects, in locking order.

    ``visible`` holds numbers, UUIDs or prefixes of UUIDs, as in ``CUDA_VISIBLE_DEVICES``. A name that matches no GPU of
    the host (such as a MIG partition) selects all GPUs: too many locks are slow, but too few are wrong.
    """
    selected: set[str] = set()
    for name in visible:
        if name.isdigit() and int(name) < len(host):
            selected.add(host[int(name)])
        elif matches := [uuid for uuid in host if name.startswith("GPU-") and uuid.startswith(name)]:
            selected.update(matches)
        else:
            return tuple(sorted(host))
    return tuple(sorted(selected))


class GpuLease:
    """Exclusive use of GPUs until its release. A child process can inherit the ``descriptors`` of the locks."""

    def __init__(self, descriptors: tuple[int, ...], release: Callable[[], None]) -> None:
        self.descriptors, self._on_release = descriptors, release

    def __enter__(self) -> GpuLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the GPUs. Safe to call twice."""
        on_release, self._on_release = self._on_release, lambda: None
        on_release()


class GpuLocks:
    """The GPU locks of one process. While any lease exists, the process takes no further locks, to prevent deadlocks.

    ``driver`` is the directory in which the driver lists its GPUs.
    """

    def __init__(self, driver: Path = _DRIVER) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._leases = 0

    def acquire(self, environment: Mapping[str, str]) -> GpuLease:
        """Wait for all GPUs that are visible in ``environment``, lock them and return a lease."""
        with self._lock:
            if not self._leases:
                try:
                    for uuid in select_gpus(list_host_gpus(self._driver), visible_gpus(environment=environment)):
                        self._descriptors.append(_acquire_lock(uuid, environment))
                except BaseException:
                    self._close()
                    raise
            self._leases += 1
            return GpuLease(tuple(self._descriptors), self._release)

    def _release(self) -> None:
        """Close the locks with the last lease. A child process that inherited them still holds them."""
        with self._lock:
            self._leases -= 1
            if not self._leases:
                self._close()

    def _close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


_locks = GpuLocks()


def acquire_gpus() -> GpuLease:
    """Wait for exclusive use of all GPUs that this process may see. Enter the lease, or release it."""
    if current_slot().scheduled:
        return GpuLease((), lambda: None)
    return _locks.acquire(os.environ)


def _acquire_lock(uuid: str, environment: Mapping[str, str]) -> int:
    """Open and lock the lock file of a GPU. The log names the current holder while waiting.

    The file is shared by all users of the host and never removed. The first process creates it.
    """
    path = Path(environment.get(LOCKS) or tempfile.gettempdir()) / f"mergegate-{uuid}.lock"
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = -1
    while descriptor < 0:
        # Open and creation are separate calls: in a shared directory, Linux forbids opening another user's file with
        # O_CREAT.
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            with suppress(FileExistsError):
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(descriptor, 0o666)  # regardless of the umask
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
            _log.warning("%s is in use by another job (%s); waiting until it ends", uuid, holder or "unknown")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

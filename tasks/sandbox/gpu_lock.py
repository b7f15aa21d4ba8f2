"""One job per GPU of this host: a lock named by the GPU's UUID, which dies with whoever holds it.

::

    with hold_gpus():                                          # all that this process may see
        ...
    held = take_gpus()                                         # the same for a process, until it and all that it
    SupervisedProcess(..., inherited=held.descriptors)         # started are gone, and we have let go

A queue of jobs can forget: when a worker is killed, what it had started runs on. So the machine itself knows. Whoever
wants GPUs takes all that its process may see (``CUDA_VISIBLE_DEVICES``) in one order, so nobody waits in a circle; in
one process they are one job's, however often they are asked for. On a cluster they are its scheduler's to give out.
Locks lie in a directory that all users of the host share (``MERGEGATE_GPU_LOCKS``, else the system's for temporary
files); where the system has none (no ``/proc/driver/nvidia``), nothing is locked.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mergegate.tasks.runners import current_slot, visible_gpus

LOCKS = "MERGEGATE_GPU_LOCKS"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]{4,64})")
_log = logging.getLogger(__name__)


def gpus_of_host(driver: Path = _DRIVER) -> tuple[str, ...]:
    """UUIDs in the order of their places on the bus, as NVML and, where all are of a kind, CUDA count them."""
    found = []
    for place in sorted(driver.glob("*/information")):
        with suppress(OSError, UnicodeDecodeError):
            if said := _UUID.search(place.read_text()):
                found.append(said[1])
    return tuple(found)


def gpus_to_hold(host: Sequence[str], visible: Sequence[str]) -> tuple[str, ...]:
    """Those of ``host`` that ``visible`` means, in the order in which they are locked.

    Args:
        visible: Numbers, UUIDs or beginnings of them, as ``CUDA_VISIBLE_DEVICES`` has them. What means none of the
            host's (a part of a GPU: MIG) means all: held too much is slow, held too little is wrong.
    """
    chosen: set[str] = set()
    for name in visible:
        if name.isdigit() and int(name) < len(host):
            chosen.add(host[int(name)])
        elif meant := [uuid for uuid in host if name.startswith("GPU-") and uuid.startswith(name)]:
            chosen.update(meant)
        else:
            return tuple(sorted(host))
    return tuple(sorted(chosen))


class GpuLease:
    """What somebody in this process holds, until he lets go of it.

    Args:
        descriptors: Open files with the locks, for a process to inherit.
        release: What letting go means.
    """

    def __init__(self, descriptors: tuple[int, ...], release: Callable[[], None]) -> None:
        self.descriptors, self._release = descriptors, release

    def release(self) -> None:
        """Let go; harmless if that has been done."""
        release, self._release = self._release, lambda: None
        release()


class GpuLocks:
    """The locks of one process. As long as somebody here holds any, no more are taken: a second set could be waited
    for in a circle.

    Args:
        driver: Where the driver tells of its GPUs.
    """

    def __init__(self, driver: Path = _DRIVER) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._holders = 0

    def take(self, environment: Mapping[str, str]) -> GpuLease:
        """Wait for all GPUs that ``environment`` lets a process see.

        Raises:
            OSError: where a lock cannot be made.
        """
        with self._lock:
            if not self._holders:
                try:
                    for uuid in gpus_to_hold(gpus_of_host(self._driver), visible_gpus(environment=environment)):
                        self._held.append(_locked(uuid, environment))
                except BaseException:
                    self._close()
                    raise
            self._holders += 1
            return GpuLease(tuple(self._held), self._give_back)

    def _give_back(self) -> None:
        """The last one to do so frees them, unless a process has inherited them."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._close()

    def _close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()


_locks = GpuLocks()


def acquire_gpus() -> GpuLease:
    """The GPUs that this process may see, alone on this host; waits until others are done with them. To be released."""
    if current_slot().scheduled:
        return GpuLease((), lambda: None)
    return _locks.take(os.environ)


@contextmanager
def hold_gpus() -> Iterator[None]:
    """The same for as long as the block runs."""
    held = acquire_gpus()
    try:
        yield
    finally:
        held.release()


def _locked(uuid: str, environment: Mapping[str, str]) -> int:
    """The lock of a GPU, held; whoever holds it is named in the log while we wait."""
    descriptor = _opened(Path(environment.get(LOCKS) or tempfile.gettempdir()) / f"mergegate-{uuid}.lock")
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
            _log.warning("%s is in use by another job (%s): waiting until it is done", uuid, holder or "unknown")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _opened(path: Path) -> int:
    """The file of a lock, which is nobody's: whoever comes first makes it for all users of the host, and nobody
    removes it. Linux lets nobody open another's file in a shared directory by a call that would make it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            with suppress(FileExistsError):
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(descriptor, 0o666)  # whatever the umask is
                return descriptor

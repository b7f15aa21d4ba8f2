"""A small process between the flow and a server, which ends every process of the server whatever happens to the flow.

Run by path with a bare interpreter (``python -I supervisor.py``), so that it costs milliseconds and little memory. It
reads one line of JSON, ``{command, environment, log, grace, limit}``, starts the command in a session of its own, and
answers ``{"pid", "scratch"}`` or ``{"error"}``. From then on it waits for the first of: its standard input closes (the
flow wants an end, or was killed), its parent is another process (the same, should a third one hold the pipe open), the
server exits, ``limit`` seconds pass. Then it ends what is left and answers ``{"returncode", "peak_memory",
"peak_gpu_memory", "why"}``.

Nothing can escape: the supervisor is the subreaper of all its descendants (prctl(2), PR_SET_CHILD_SUBREAPER), so
workers whose parent died, or which left the process group, become its children; it goes when it has none left.
Temporary files of the server go to a directory that is removed at the end; so are segments of shared memory that it
left behind. Linux only: elsewhere nothing tells whose child is whose.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICK = 0.5  # seconds between two looks at memory and parent
_REST = 20  # times as long as a look at memory took until the next one: the kernel counts pages meanwhile
_LINGER = 3.0  # seconds that workers have to follow their leader
_PAUSE = 0.02
_LONGEST_PLACE = 40  # characters
_SHARED_MEMORY = "/dev/shm/"

_libc = ctypes.CDLL(None)


class Supervisor:
    """One server, from its start to the end of its last process."""

    def __init__(self, order: dict[str, Any], wake: int) -> None:
        self._order, self._wake = order, wake
        self._parent = os.getppid()
        self._began = time.time()
        self._gpus = Gpus()
        self._peak = self._gpu_peak = 0  # bytes
        self._look_again = 0.0
        self._returncode: int | None = None
        self.stopping = False

    def run(self, scratch: str) -> None:
        """Start, wait, end; see the module docstring."""
        command: list[str] = self._order["command"]
        try:
            self._pid = self._start(command, scratch)
        except OSError as error:
            _say({"error": f"{command[0]}: {error.strerror}"})
            return
        _say({"pid": self._pid, "scratch": scratch})
        why = self._wait(time.monotonic() + self._order["limit"])
        self._end()
        peaks = {"peak_memory": self._peak, "peak_gpu_memory": self._gpu_peak}
        _say({"returncode": self._returncode, "why": why, **peaks})

    def _start(self, command: list[str], scratch: str) -> int:
        with Path(self._order["log"]).open("ab", buffering=0) as log:
            server = subprocess.Popen(
                command,
                env={**self._order["environment"], "TMPDIR": scratch},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Should even the supervisor be killed, at least the leader goes with it.
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )
        server.returncode = 0  # it is reaped here, with all the others: Popen has nothing left to do
        return server.pid

    def _wait(self, deadline: float) -> str:
        poll = select.poll()
        poll.register(0, select.POLLIN | select.POLLHUP)
        poll.register(self._wake, select.POLLIN)
        while True:
            self._reap()
            if self._returncode is not None:
                return "exited"
            if time.monotonic() > deadline:
                return "limit"
            if self.stopping or os.getppid() != self._parent:
                return "asked"
            self._measure()
            for descriptor, _ in poll.poll(_TICK * 1000):
                if descriptor == 0 and not os.read(0, 4096):
                    return "asked"
                if descriptor == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)

    def _end(self) -> None:
        """End all that is left: the leader politely, the others after it, then whoever is still there."""
        self._measure(at_once=True)
        segments = {name for pid in _descendants() for name in _segments(pid)}
        if self._returncode is None:
            _signal(self._pid, signal.SIGTERM)
            deadline = time.monotonic() + self._order["grace"]
            while self._returncode is None and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                self._reap()
        if self._returncode is not None:
            # Wherever they are: some leave the process group.
            for pid in _descendants():
                _signal(pid, signal.SIGTERM)
            deadline = time.monotonic() + _LINGER
            while _descendants() and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                self._reap()
        while left := _descendants():
            segments.update(name for pid in left for name in _segments(pid))
            for pid in left:
                _signal(pid, signal.SIGKILL)
            self._reap()
            time.sleep(_PAUSE)
        for segment in map(Path, segments):
            # Only what this server made; whatever is older belongs to somebody else.
            with contextlib.suppress(OSError):
                if segment.stat().st_ctime >= self._began:
                    segment.unlink()

    def _measure(self, *, at_once: bool = False) -> None:
        if (began := time.monotonic()) < self._look_again and not at_once:
            return
        processes = _descendants()
        self._peak = max(self._peak, sum(map(_memory, processes)))
        self._gpu_peak = max(self._gpu_peak, self._gpus.used_by(processes))
        ended = time.monotonic()
        self._look_again = ended + _REST * (ended - began)

    def _reap(self) -> None:
        """Take note of all children that have ended by now."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._returncode = os.waitstatus_to_exitcode(status)


class Gpus:
    """Memory on NVIDIA GPUs, as the driver's own library counts it (NVML); nothing where there is none.

    Inside a container the library names processes as the host does, if at all. Where it knows none of ours, what is
    used on the GPUs beyond what was used at the start counts.

    Args:
        library: The library, loaded; None: that of this machine.
    """

    def __init__(self, library: Any = None) -> None:
        self._devices: list[ctypes.c_void_p] = []
        with contextlib.suppress(OSError, AttributeError):
            self._nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
            count = ctypes.c_uint()
            if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return
            for at in range(count.value):
                device = ctypes.c_void_p()
                if self._nvml.nvmlDeviceGetHandleByIndex_v2(at, ctypes.byref(device)) == 0:
                    self._devices.append(device)
        self._before = self._used()

    def used_by(self, processes: list[int]) -> int:
        """Bytes on all GPUs."""
        if not self._devices:
            return 0
        known = sum(size for device in self._devices for pid, size in self._processes(device) if pid in processes)
        return known or max(0, self._used() - self._before)

    def _used(self) -> int:
        total = 0
        for device in self._devices:
            memory = (ctypes.c_ulonglong * 3)()  # total, free, used
            if self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                total += memory[2]
        return total

    def _processes(self, device: ctypes.c_void_p) -> list[tuple[int, int]]:
        """Ids and bytes of the processes that compute on a device."""
        count, found = ctypes.c_uint(_MOST_ON_A_GPU), (_OnGpu * _MOST_ON_A_GPU)()
        ask = getattr(self._nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None or ask(device, ctypes.byref(count), found):
            return []
        return [(each.pid, each.size) for each in found[: count.value] if each.size != _UNKNOWN]


class _OnGpu(ctypes.Structure):
    """nvmlProcessInfo_t of NVML's version 3 of the query."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("size", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_MOST_ON_A_GPU = 128
_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


def main() -> None:
    """Read the order and carry it out."""
    wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        # Of a terminal: what they mean is the flow's to decide. Caught, not ignored, which the server would inherit.
        signal.signal(number, lambda *_: None)
    line = sys.stdin.buffer.readline()
    if not line:
        return
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = Supervisor(json.loads(line), wake)

    def stop(*_: object) -> None:
        supervisor.stopping = True

    signal.signal(signal.SIGTERM, stop)
    place = tempfile.gettempdir()
    # Servers put sockets there, whose paths may have 107 characters; vLLM's names take 36 of them.
    scratch = tempfile.mkdtemp(prefix="mergegate-serve-", dir=place if len(place) <= _LONGEST_PLACE else "/tmp")
    try:
        supervisor.run(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _descendants() -> list[int]:
    """Every process below this one that has not ended, and every child that waits to be reaped."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, above = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state != "Z" or int(above) == os.getpid():
                    children.setdefault(int(above), []).append(int(entry.name))
    found: list[int] = []
    nodes = [os.getpid()]
    while nodes:
        below = children.get(nodes.pop(), [])
        found += below
        nodes += below
    return found


def _memory(pid: int) -> int:
    """Bytes that a process takes away from others: its share of what belongs to no file (pages that several processes
    have are shared out among them), and of shared memory. Mapped files are the page cache's."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return _kilobytes(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss_Anon:", "Pss_Shmem:")
    with contextlib.suppress(OSError, IndexError, ValueError):  # an old kernel, or a process that hides its pages
        return _kilobytes(Path(f"/proc/{pid}/status").read_text(), "RssAnon:", "RssShmem:")
    return 0


def _kilobytes(text: str, *names: str) -> int:
    return sum(int(text.split(name)[1].split()[0]) * 1024 for name in names)


def _segments(pid: int) -> list[str]:
    """Files of shared memory that a process has mapped."""
    with contextlib.suppress(OSError):
        lines = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines())
        return [parts[5] for parts in lines if len(parts) == 6 and parts[5].startswith(_SHARED_MEMORY)]
    return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()

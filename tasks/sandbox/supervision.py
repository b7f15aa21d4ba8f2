"""A process that ends with everything it started: when it is told to, and when we are gone, however that happens.

::

    with log.open("ab") as output:
        process = SupervisedProcess(["vllm", "serve"], environment, output, name="serve", grace=20)
    process.alive, process.pid, process.scratch
    process.end().returncode                            # and no process or temporary file is left

Between us and the process stands a supervisor: this file, run by path with a bare interpreter (``python -I -S``), so
that it costs milliseconds and little memory, works while we are in code that never lets go of the interpreter, and
survives us by the moment that it needs. It reads one line of JSON, starts the command in a session of its own, and
answers ``{"pid", "scratch"}`` or ``{"error"}``. From then on it waits for the first of: its standard input closes (we
want an end, or were killed: the lifeline), its parent is another process (the same, should a third one hold the pipe
open), the process exits, ``limit`` seconds pass. Then it ends what is left and answers ``{"returncode", "why",
"peak_memory", "peak_gpu_memory"}``.

Nothing can escape: the supervisor is the subreaper of all its descendants (prctl(2), PR_SET_CHILD_SUBREAPER), so
workers whose parent died, or which left the process group, become its children; it goes when it has none left.
Temporary files go to a directory that is removed at the end; so are segments of shared memory that were left behind.
That takes Linux: elsewhere nothing tells whose child is whose, and only the process group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import logging
import math
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergegate.tasks.sandbox.confinement import Confinement

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICK = 0.5  # seconds between two looks at memory and parent
_REST = 20  # times as long as a look at memory took until the next one: the kernel counts pages meanwhile
_LINGER = 3.0  # seconds that workers have to follow their leader, where that has any grace
_PAUSE = 0.02
_STOPS_WITHIN = 0.2  # seconds; one that waits for a disk stops later
_SLACK = 15.0  # seconds beyond its grace after which a supervisor itself is given up
_LONGEST_PLACE = 40  # characters
_PROC = Path("/proc")
_SHARED_MEMORY = "/dev/shm/"

_libc = ctypes.CDLL(None)
_log = logging.getLogger(__name__)


class NotStarted(Exception):
    """The command could not be started; the message says why."""


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended, and what it had taken, with everything below it.

    Args:
        returncode: As in ``subprocess``: negative for a signal. None: nobody could tell, its supervisor was killed.
        why: ``exited`` by itself, ``asked`` to end, or for its ``limit``.
        peak_memory: Bytes, where it was measured.
        peak_gpu_memory: Bytes on all GPUs, where it was measured.
    """

    returncode: int | None = None
    why: str = ""
    peak_memory: int = 0
    peak_gpu_memory: int = 0

    def __str__(self) -> str:
        """``ended (asked), exit code -9``."""
        why = f" ({self.why})" if self.why else ""
        return f"ended{why}, exit code {'unknown' if self.returncode is None else self.returncode}"


class SupervisedProcess:
    """A process, and the supervisor that ends it; it runs when this is made.

    Args:
        command: Its program and arguments.
        environment: All of its environment; ``TMPDIR`` is added.
        output: Open file that gets what it prints.
        name: What its temporary directory is called by: ``mergegate-NAME-…``.
        grace: Seconds that it has to end by itself when it should; 0: it is killed.
        limit: Seconds after which it is ended in any case.
        pass_fds: Descriptors that it inherits.
        confinement: What it may reach; None: all that we may. What this system cannot keep it from is logged.
        short_paths: It puts sockets into its temporary directory, whose paths may have 107 characters.
        measured: Take note of its memory.
        inherited: Descriptors that stay open until it and everything it started are gone; it does not see them.

    Raises:
        NotStarted: when there is no such command, or it may not be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        *,
        name: str,
        grace: float = 0.0,
        limit: float | None = None,
        pass_fds: Sequence[int] = (),
        confinement: Confinement | None = None,
        short_paths: bool = False,
        measured: bool = False,
        inherited: Sequence[int] = (),
    ) -> None:
        # Not at the top: the supervisor runs this file by itself.
        from mergegate.merge_core.wording import detail
        from mergegate.tasks.sandbox.linux import require_linux

        require_linux()
        order = {
            "command": list(command),
            "environment": dict(environment),
            "name": name,
            "grace": grace,
            "limit": limit,
            "pass_fds": list(pass_fds),
            "confinement": asdict(confinement) if confinement else None,
            "short_paths": short_paths,
            "measured": measured,
        }
        self._patience = grace + _SLACK
        self._ending = threading.Lock()
        self._end: ProcessEnd | None = None
        self._supervisor = subprocess.Popen(
            # Isolated and without site-packages: it needs the standard library only.
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            pass_fds=(*pass_fds, *inherited),
            start_new_session=True,
        )
        self.pid, self.scratch = 0, Path()
        try:
            started = self._give(order)
        except BaseException:
            self.end()
            raise
        if "error" in started:
            self.end()
            raise NotStarted(started["error"])
        self.pid, self.scratch = int(started["pid"]), Path(started["scratch"])
        wanted = {"files", "network", *(["memory"] if confinement.memory is not None else [])} if confinement else set()
        detail("process %d (%s): %s", self.pid, name, shlex.join(command))
        self.unconfined = tuple(sorted(wanted - set(started["confined"])))
        if self.unconfined:
            _log.warning("%s: this system does not confine processes in: %s", name, ", ".join(self.unconfined))

    @property
    def alive(self) -> bool:
        """Whether it runs, or has not been cleared away yet."""
        return self._supervisor.poll() is None

    def ends(self, within: float) -> bool:
        """Whether it ends by itself, and has been cleared away, within some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(within)
        return not self.alive

    def end(self) -> ProcessEnd:
        """End it and everything it started; harmless, and the same answer, if that is over already."""
        with self._ending:
            if self._end is None:
                from mergegate.merge_core.wording import detail

                self._end = self._ended()
                detail("process %d: %s", self.pid, self._end)
            return self._end

    def _give(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.stdin.write(json.dumps(order).encode() + b"\n")
            self._supervisor.stdin.flush()
        answer = self._supervisor.stdout.readline() or b'{"error": "the supervisor ended"}'
        return dict(json.loads(answer))

    def _ended(self) -> ProcessEnd:
        try:
            said, _ = self._supervisor.communicate(timeout=self._patience)  # closes its input: the lifeline
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            said, _ = self._supervisor.communicate()
        if self._supervisor.returncode != 0:
            self._sweep()
        with contextlib.suppress(IndexError, ValueError, TypeError):
            return ProcessEnd(**json.loads(said.splitlines()[-1]))
        return ProcessEnd()

    def _sweep(self) -> None:
        """What the supervisor would have done, if it was killed: the leader went with it, its group did not."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            shutil.rmtree(self.scratch, ignore_errors=True)


class Supervisor:
    """One process, from its start to the end of the last one below it."""

    def __init__(self, order: dict[str, Any], wake: int) -> None:
        self._order, self._wake = order, wake
        self._confined: list[str] = []
        self._parent = os.getppid()
        self._began = time.time()
        self._gpus = Gpus() if order["measured"] else None
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
        _say({"pid": self._pid, "scratch": scratch, "confined": self._confined})
        limit = self._order["limit"]
        why = self._wait(time.monotonic() + limit if limit is not None else math.inf)
        self._end()
        peaks = {"peak_memory": self._peak, "peak_gpu_memory": self._gpu_peak}
        _say({"returncode": self._returncode, "why": why, **peaks})

    def _start(self, command: list[str], scratch: str) -> int:
        passed: list[int] = self._order["pass_fds"]
        holds, holds_writer = os.pipe()

        def prepare() -> None:
            if self._order["confinement"] is not None:
                os.environ["TMPDIR"] = scratch
                os.write(holds_writer, json.dumps(_confine(self._order["confinement"])).encode())
            # Should even the supervisor be killed, at least the leader goes with it.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        process = subprocess.Popen(
            command,
            env={**self._order["environment"], "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=2,  # ours is the answer to whoever ordered it
            stderr=2,
            start_new_session=True,
            pass_fds=passed,
            preexec_fn=prepare,
        )
        os.close(holds_writer)
        with os.fdopen(holds, "rb") as said:
            self._confined = json.loads(said.read() or b"[]")
        for descriptor in passed:  # that its other end can tell when the process is gone
            os.close(descriptor)
        process.returncode = 0  # it is reaped here, with all the others: Popen has nothing left to do
        return process.pid

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
        segments: set[str] = set()
        grace: float = self._order["grace"]
        if not _PROC.is_dir() and self._returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        if self._returncode is None and grace:
            segments |= _told_to_end(self._pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self._returncode is None and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                self._reap()
        if self._returncode is not None and grace:
            # Wherever they are: some leave the process group.
            for pid in _descendants():
                segments |= _told_to_end(pid, signal.SIGTERM)
            deadline = time.monotonic() + _LINGER
            while _descendants() and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                self._reap()
        while left := _descendants():
            for pid in left:
                segments |= _told_to_end(pid, signal.SIGKILL)
            self._reap()
            time.sleep(_PAUSE)
        for segment in map(Path, segments):
            # Only what this process made; whatever is older belongs to somebody else.
            with contextlib.suppress(OSError):
                if segment.stat().st_ctime >= self._began:
                    segment.unlink()

    def _measure(self, *, at_once: bool = False) -> None:
        if self._gpus is None or ((began := time.monotonic()) < self._look_again and not at_once):
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
    """Of the supervisor: read the order and carry it out."""
    wake, wake_writer = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        # Of a terminal: what they mean is the flow's to decide. Caught, not ignored, which the process would inherit.
        signal.signal(number, lambda *_: None)
    line = sys.stdin.buffer.readline()
    if not line:
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    order: dict[str, Any] = json.loads(line)
    supervisor = Supervisor(order, wake)

    def stop(*_: object) -> None:
        supervisor.stopping = True

    signal.signal(signal.SIGTERM, stop)
    place = tempfile.gettempdir()
    if order["short_paths"] and len(place) > _LONGEST_PLACE:  # 107 characters, of which vLLM's names take 36
        place = "/tmp"
    scratch = tempfile.mkdtemp(prefix=f"mergegate-{order['name']}-", dir=place)
    try:
        supervisor.run(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _confine(wanted: dict[str, Any]) -> list[str]:
    """As ``confinement.confine``, from the file beside this one: here is no package to import from."""
    spec = importlib.util.spec_from_file_location("confinement", Path(__file__).with_name("confinement.py"))
    assert spec is not None
    assert spec.loader is not None
    confinement = importlib.util.module_from_spec(spec)
    sys.modules["confinement"] = confinement  # where dataclasses look
    spec.loader.exec_module(confinement)
    return list(confinement.confine(confinement.Confinement(**wanted)))


def _descendants() -> list[int]:
    """Every process below this one that has not ended, and every child that waits to be reaped."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
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


def _told_to_end(pid: int, number: int) -> set[str]:
    """Send a signal, and the segments of shared memory that the process leaves if it obeys. It is stopped while they
    are read: one that is made a moment later would be nobody's."""
    _signal(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _STOPS_WITHIN
    while _state(pid) not in ("T", "t", "Z", "") and time.monotonic() < deadline:
        time.sleep(_STOPS_WITHIN / 100)
    found = _segments(pid)
    _signal(pid, number)
    _signal(pid, signal.SIGCONT)
    return found


def _state(pid: int) -> str:
    """As in proc(5); empty for a process that is no more."""
    with contextlib.suppress(OSError, IndexError):
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


def _segments(pid: int) -> set[str]:
    """Files of shared memory that a process has mapped, or opened and not mapped yet."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        lines = (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
        found |= {parts[5] for line in lines if len(parts := line.split(maxsplit=5)) == 6}
    with contextlib.suppress(OSError):
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(descriptor.readlink()))
    return {name for name in found if name.startswith(_SHARED_MEMORY)}


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # of Linux
        _libc.prctl(option, value, 0, 0, 0)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()

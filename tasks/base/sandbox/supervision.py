"""Run a process that ends together with everything it started: on request, or when this process dies for any reason.

::

    with log.open("ab") as output:
        process = SupervisedProcess(["vllm", "serve"], environment, output, ProcessOptions("serve", grace=20))
    process.alive, process.pid, process.scratch
    process.end().returncode                            # and no process or temporary file is left

A supervisor process runs between this process and the command: this file, run by path with a bare interpreter
(``python -I -S``). It starts in milliseconds, needs little memory, works while this process is busy in code that holds
the GIL, and outlives this process just long enough to clean up. It reads one line of JSON, starts the command in its
own session, and answers ``{"pid", "scratch"}`` or ``{"error"}``. Then it waits for the first of these events:

* Its standard input is closed, because this process requested the end or was killed.
* Its parent process changes, because this process was killed while another process holds the pipe open.
* The command exits.
* ``limit`` seconds have passed.

Then the supervisor ends all remaining processes and answers
``{"returncode", "reason", "peak_memory", "peak_gpu_memory"}``.

No process can escape. The supervisor is the subreaper of all its descendants (prctl(2), PR_SET_CHILD_SUBREAPER), so it
adopts workers whose parent died or that left the process group. It exits when it has no children left. It removes the
directory of the temporary files and leftover shared memory segments. All of this needs Linux: elsewhere, the supervisor
cannot identify descendants and ends only the process group.
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
    from mergegate.tasks.base.sandbox.confinement import Confinement

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICK = 0.5  # seconds between two checks of memory and parent
_REST = 20  # pause between memory checks, as a multiple of their duration: the kernel counts pages during a check
_LINGER = 3.0  # seconds that workers have to exit after the command, if it has a grace period
_PAUSE = 0.02
_TAIL = 1 << 16  # bytes at the end of the output that are searched for the cause of a failure
_STOPS_WITHIN = 0.2  # seconds; a process that waits for a disk takes longer to stop
_SLACK = 15.0  # seconds beyond the grace period after which the supervisor itself is killed
_MAX_PATH_LENGTH = 40  # characters
_PROC = Path("/proc")
_SHARED_MEMORY = "/dev/shm/"

_libc = ctypes.CDLL(None)
_log = logging.getLogger(__name__)


class NotStarted(Exception):
    """The command could not be started. The message gives the reason."""


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended, and the resources that it and its descendants used."""

    # As in ``subprocess``: negative for a signal. None: unknown, because the supervisor was killed.
    returncode: int | None = None
    reason: str = ""  # ``exited`` (on its own), ``requested`` (by the caller) or ``limit`` (its time limit expired)
    peak_memory: int = 0  # Peak memory in bytes, if measured.
    peak_gpu_memory: int = 0  # Peak memory on all GPUs in bytes, if measured.

    def __str__(self) -> str:
        """Return the reason and the exit code, for example ``ended (requested), exit code -9``."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"ended{reason}, exit code {'unknown' if self.returncode is None else self.returncode}"


@dataclass(frozen=True)
class ProcessOptions:
    """Limits, restrictions and inherited files of a supervised process."""

    name: str  # Part of the name of its temporary directory: ``mergegate-NAME-…``.
    grace: float = 0.0  # Seconds that it has to exit after a request to end. 0: it is killed immediately.
    limit: float | None = None  # Seconds after which it is ended in any case. None: no limit.
    pass_fds: tuple[int, ...] = ()  # File descriptors that it inherits.
    # Restrictions. Those that the system does not support are logged. None: no restrictions.
    confinement: Confinement | None = None
    # Whether the path of its temporary directory must be short, because it creates sockets there, whose paths are
    # limited to 107 characters.
    short_paths: bool = False
    measured: bool = False  # Whether to measure its memory.
    # File descriptors that stay open until it and all its descendants are gone. It cannot see them.
    inherited: tuple[int, ...] = ()


def require_linux(system: str = sys.platform) -> None:
    """Raise Refused unless this system is Linux.

    Child processes are confined and supervised by system interfaces that only Linux has: prctl(2), unshare(2) and
    ``/proc``. Without them, a killed run would leave processes that hold a GPU, and third-party code would have network
    access. So models and tasks run on Linux only. The commands ``merge`` and ``plan`` work on all systems.
    """
    from mergegate.merge_core.errors import Refused

    if system != "linux":
        raise Refused(
            "this system",
            found=f"{system} cannot run models and tasks",
            expected="Linux, whose prctl(2) and /proc are needed to supervise child processes",
            remedy="run mergegate in a container (the image is in containers/). The commands plan and merge work here",
        )


class SupervisedProcess:
    """A running process with a supervisor that ends it. Creating the object starts the process.

    ``environment`` is complete except for ``TMPDIR``. ``output`` is an open file that receives the output.

    Raises:
        NotStarted: The command does not exist or is not executable.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes], options: ProcessOptions
    ) -> None:
        # Imported locally, because the supervisor runs this file without the package.
        from mergegate.merge_core.wording import detail

        require_linux()
        self._patience = options.grace + _SLACK
        self._ending = threading.Lock()
        self._end: ProcessEnd | None = None
        self._supervisor = subprocess.Popen(
            # Isolated and without site-packages: the supervisor needs the standard library only.
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            pass_fds=(*options.pass_fds, *options.inherited),
            start_new_session=True,
        )
        self.pid, self.scratch = 0, Path()
        try:
            started = self._send({"command": list(command), "environment": dict(environment), **asdict(options)})
        except BaseException:
            self.end()
            raise
        if "error" in started:
            self.end()
            raise NotStarted(started["error"])
        self.pid, self.scratch = int(started["pid"]), Path(started["scratch"])
        required = {"files", "network"} if options.confinement else set()
        if options.confinement and options.confinement.memory is not None:
            required.add("memory")
        detail("process %d (%s): %s", self.pid, options.name, shlex.join(command))
        self.unconfined = tuple(sorted(required - set(started["confined"])))
        if self.unconfined:
            _log.warning("%s: this system does not confine processes in: %s", options.name, ", ".join(self.unconfined))

    @property
    def alive(self) -> bool:
        """Whether the process is running or still being cleaned up."""
        return self._supervisor.poll() is None

    def ends(self, within: float) -> bool:
        """Wait up to ``within`` seconds. Return whether the process has ended and was cleaned up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(within)
        return not self.alive

    def wait(self) -> ProcessEnd:
        """Wait until the process has ended. If the wait is interrupted, end it."""
        try:
            while not self.ends(within=1.0):
                pass
        finally:
            end = self.end()
        return end

    def end(self) -> ProcessEnd:
        """End the process and everything it started. Further calls are harmless and return the same result."""
        with self._ending:
            if self._end is None:
                from mergegate.merge_core.wording import detail

                try:
                    report, _ = self._supervisor.communicate(timeout=self._patience)  # closes its input: the lifeline
                except subprocess.TimeoutExpired:
                    self._supervisor.kill()
                    report, _ = self._supervisor.communicate()
                if self._supervisor.returncode != 0 and self.pid:
                    # The supervisor was killed. The command died with it, but its process group did not.
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self.pid, signal.SIGKILL)
                    shutil.rmtree(self.scratch, ignore_errors=True)
                self._end = ProcessEnd()
                with contextlib.suppress(IndexError, ValueError, TypeError):
                    self._end = ProcessEnd(**json.loads(report.splitlines()[-1]))
                detail("process %d: %s", self.pid, self._end)
            return self._end

    def _send(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.stdin.write(json.dumps(order).encode() + b"\n")
            self._supervisor.stdin.flush()
        answer = self._supervisor.stdout.readline() or b'{"error": "the supervisor exited unexpectedly"}'
        return dict(json.loads(answer))


def output_tail(output: IO[bytes]) -> str:
    """Return the last 64 KiB of a process's output, where libraries often print the cause of a failure."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
    return output.read().decode(errors="replace")


class Supervisor:
    """Supervisor of one command, which runs until the last descendant of the command has ended."""

    def __init__(self, order: dict[str, Any], wake: int) -> None:
        self._order, self._wake = order, wake
        self._confined: list[str] = []
        self._parent = os.getppid()
        self._began = time.time()
        self._gpus = Gpus() if order["measured"] else None
        self._peak = self._gpu_peak = 0  # bytes
        self._next_measurement = 0.0
        self._returncode: int | None = None
        self.stopping = False

    def run(self, scratch: str) -> None:
        """Start the command, wait until it exits or has to be stopped, and clean up."""
        command: list[str] = self._order["command"]
        try:
            self._pid = self._start(command, scratch)
        except OSError as error:
            _report({"error": f"{command[0]}: {error.strerror}"})
            return
        _report({"pid": self._pid, "scratch": scratch, "confined": self._confined})
        limit = self._order["limit"]
        reason = self._wait(time.monotonic() + limit if limit is not None else math.inf)
        self._end()
        peaks = {"peak_memory": self._peak, "peak_gpu_memory": self._gpu_peak}
        _report({"returncode": self._returncode, "reason": reason, **peaks})

    def _start(self, command: list[str], scratch: str) -> int:
        descriptors: list[int] = self._order["pass_fds"]
        applied, applied_writer = os.pipe()
        environment = {**self._order["environment"], "TMPDIR": scratch}

        def prepare() -> None:
            if self._order["confinement"] is not None:
                # This process cannot import the package, so load the module from its file.
                spec = importlib.util.spec_from_file_location("confinement", Path(__file__).with_name("confinement.py"))
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                sys.modules["confinement"] = module  # dataclasses look it up there
                spec.loader.exec_module(module)
                limits = module.Confinement(**self._order["confinement"])
                restrictions = module.confine(limits, command, environment)
                os.write(applied_writer, json.dumps(restrictions).encode())
            # If the supervisor itself is killed, the command dies with it.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,  # the supervisor's own stdout carries its answers
            stderr=2,
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=prepare,
        )
        os.close(applied_writer)
        with os.fdopen(applied, "rb") as answer:
            self._confined = json.loads(answer.read() or b"[]")
        for descriptor in descriptors:  # so that the other end notices when the process is gone
            os.close(descriptor)
        process.returncode = 0  # _reap collects all children, so Popen must not wait for this one
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
                return "requested"
            self._measure()
            for descriptor, _ in poll.poll(_TICK * 1000):
                if descriptor == 0 and not os.read(0, 4096):
                    return "requested"
                if descriptor == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)

    def _end(self) -> None:
        """End all remaining processes: ask the command first, then its descendants, and kill the rest."""
        self._measure(at_once=True)
        segments: set[str] = set()
        grace: float = self._order["grace"]
        if not _PROC.is_dir() and self._returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        if self._returncode is None and grace:
            segments |= _signal_and_list_segments(self._pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self._returncode is None and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                self._reap()
        if self._returncode is not None and grace:
            # Signal each descendant, because some leave the process group.
            for pid in _descendants():
                segments |= _signal_and_list_segments(pid, signal.SIGTERM)
            deadline = time.monotonic() + _LINGER
            while _descendants() and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                self._reap()
        while remaining := _descendants():
            for pid in remaining:
                segments |= _signal_and_list_segments(pid, signal.SIGKILL)
            self._reap()
            time.sleep(_PAUSE)
        for segment in map(Path, segments):
            # Remove only segments created during this run; older ones belong to other processes.
            with contextlib.suppress(OSError):
                if segment.stat().st_ctime >= self._began:
                    segment.unlink()

    def _measure(self, *, at_once: bool = False) -> None:
        if self._gpus is None or ((began := time.monotonic()) < self._next_measurement and not at_once):
            return
        processes = _descendants()
        self._peak = max(self._peak, sum(map(_memory, processes)))
        self._gpu_peak = max(self._gpu_peak, self._gpus.used_by(processes))
        ended = time.monotonic()
        self._next_measurement = ended + _REST * (ended - began)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._returncode = os.waitstatus_to_exitcode(status)


class Gpus:
    """Memory use on NVIDIA GPUs according to the driver's library (NVML). Zero without GPUs.

    In a container, NVML lists processes by their IDs on the host, or not at all. If it lists none of the given
    processes, the increase in total memory use since the start counts as theirs.

    Args:
        library: Loaded NVML library. None: the library of this machine.
    """

    def __init__(self, library: Any = None) -> None:
        self._devices: list[ctypes.c_void_p] = []
        with contextlib.suppress(OSError, AttributeError):
            self._nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
            count = ctypes.c_uint()
            if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return
            for index in range(count.value):
                device = ctypes.c_void_p()
                if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                    self._devices.append(device)
        self._before = self._used()

    def used_by(self, processes: list[int]) -> int:
        """Return the memory that the processes use on all GPUs, in bytes."""
        if not self._devices:
            return 0
        used = 0
        for device in self._devices:
            count, entries = ctypes.c_uint(_MAX_GPU_PROCESSES), (_GpuProcess * _MAX_GPU_PROCESSES)()
            query = getattr(self._nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
            if query is not None and query(device, ctypes.byref(count), entries) == 0:
                sizes = ((entry.pid, entry.size) for entry in entries[: count.value] if entry.size != _UNKNOWN)
                used += sum(size for pid, size in sizes if pid in processes)
        return used or max(0, self._used() - self._before)

    def _used(self) -> int:
        total = 0
        for device in self._devices:
            memory = (ctypes.c_ulonglong * 3)()  # total, free, used
            if self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                total += memory[2]
        return total


class _GpuProcess(ctypes.Structure):
    """Struct nvmlProcessInfo_t in version 3 of the query."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("size", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_MAX_GPU_PROCESSES = 128
_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


def main() -> None:
    """Read the order from standard input and supervise its command."""
    wake, wake_writer = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        # The flow decides how to handle signals of a terminal. They are caught instead of ignored, because the command
        # would inherit ignored signals.
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
    directory = tempfile.gettempdir()
    if order["short_paths"] and len(directory) > _MAX_PATH_LENGTH:  # socket paths: 107 characters, 36 of them for vLLM
        directory = "/tmp"
    scratch = tempfile.mkdtemp(prefix=f"mergegate-{order['name']}-", dir=directory)
    try:
        supervisor.run(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _descendants() -> list[int]:
    """Return all running descendants of this process, and all children that wait to be reaped."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state != "Z" or int(parent) == os.getpid():
                    children.setdefault(int(parent), []).append(int(entry.name))
    descendants: list[int] = []
    nodes = [os.getpid()]
    while nodes:
        ids = children.get(nodes.pop(), [])
        descendants += ids
        nodes += ids
    return descendants


def _memory(pid: int) -> int:
    """Return the bytes that a process uses: its share of anonymous pages and shared memory.

    Pages used by several processes are divided among them. Mapped files are not counted: they belong to the page cache.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        return _kilobytes(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss_Anon:", "Pss_Shmem:")
    with contextlib.suppress(OSError, IndexError, ValueError):  # an old kernel, or a process whose pages are hidden
        return _kilobytes(Path(f"/proc/{pid}/status").read_text(), "RssAnon:", "RssShmem:")
    return 0


def _kilobytes(text: str, *names: str) -> int:
    return sum(int(text.split(name)[1].split()[0]) * 1024 for name in names)


def _signal_and_list_segments(pid: int, number: int) -> set[str]:
    """Send a signal, and return the shared memory segments that the process leaves behind if it obeys.

    These are the shared memory files that it has mapped or opened. The process is stopped while its segments are
    listed, so that it cannot create an unlisted one.
    """
    _signal(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _STOPS_WITHIN
    while time.monotonic() < deadline:
        state = ""  # As in proc(5), or empty if the process does not exist.
        with contextlib.suppress(OSError, IndexError):
            state = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        if state in ("T", "t", "Z", ""):
            break
        time.sleep(_STOPS_WITHIN / 100)
    paths: set[str] = set()
    with contextlib.suppress(OSError):
        lines = (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
        paths |= {parts[5] for line in lines if len(parts := line.split(maxsplit=5)) == 6}
    with contextlib.suppress(OSError):
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                paths.add(str(descriptor.readlink()))
    _signal(pid, number)
    _signal(pid, signal.SIGCONT)
    return {path for path in paths if path.startswith(_SHARED_MEMORY)}


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # prctl exists on Linux only
        _libc.prctl(option, value, 0, 0, 0)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _report(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()

"""Run a server in a supervised process: start it on a free port, wait for it, and end it with all of its children.

::

    with ServerProcess(launch, log, settings) as server:
        server.await_ready()
        ...                       # server.url, server.model
    server.peak_memory            # no process, port or temporary file is left

The server's log shows why it ended, and whether the model, the machine or the settings are to blame.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from mergegate.tasks.base.http import JsonClient, Unreachable
from mergegate.tasks.base.sandbox import (
    GpuLease,
    NotStarted,
    ProcessEnd,
    ProcessOptions,
    SupervisedProcess,
    acquire_gpus,
)
from mergegate.tasks.base.stage import memory_of_child
from mergegate.tasks.models.checkpoints import confinement
from mergegate.tasks.quality.serve.answers import parse_models
from mergegate.tasks.quality.serve.launch import Launch
from mergegate.tasks.quality.serve.settings import ServeSettings

GRACE = 20.0  # seconds that a server has to exit before it is killed
_TRIES = 3  # starts, each on another port, in case another process takes the port first
_PAUSE = 0.1
_TAIL = 1 << 20  # bytes at the start and at the end of a log that are searched for a cause


Blame = Literal["model", "machine", "settings"]


class ServerEnded(Exception):
    """A server ended, or was not ready in time. The message is the cause that its log shows."""

    def __init__(self, cause: str, blame: Blame, returncode: int | None) -> None:
        super().__init__(cause)
        self.cause, self.blame, self.returncode = cause, blame, returncode


class ServerProcess:
    """A server process. Entering the context starts it without waiting until it is ready; leaving ends it."""

    def __init__(self, launch: Launch, log: Path, settings: ServeSettings, grace: float = GRACE) -> None:
        self._launch, self._log, self._settings, self._grace = launch, log, settings, grace
        self._port = 0
        self._began = 0.0  # when the process started
        self._deadline = time.monotonic() + settings.timeout
        self._process: SupervisedProcess | None = None
        self._gpus = GpuLease((), lambda: None)
        self._not_started = ""
        self._end = ProcessEnd()
        self._answered = False
        self.name = f"mergegate-{secrets.token_hex(4)}"  # random, so that no other server is mistaken for this one
        self.model = self.name  # name under which the server lists the model
        self.seconds_to_ready: float | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def peak_memory(self) -> int | None:
        return self._end.peak_memory or None

    @property
    def peak_gpu_memory(self) -> int | None:
        """Peak memory use on all GPUs in bytes. None until the server has ended, or if it used no GPU."""
        return self._end.peak_gpu_memory or None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def await_ready(self, on_wait: Callable[[float], None] = lambda seconds: None) -> None:
        """Wait until the server answers and lists its model.

        ``on_wait`` is called repeatedly with the elapsed seconds. Raise ServerEnded if the server exits, or is stopped
        because it is not ready in time.
        """
        began, tries = time.monotonic(), 1
        while True:
            on_wait(time.monotonic() - began)
            if not self.alive:
                if PORT_TAKEN.search(self._text()) and tries < _TRIES:
                    tries += 1
                    self.stop()
                    self._start()
                    continue
                raise self.diagnose()
            client = JsonClient(self.url, timeout=min(5.0, self._settings.request_timeout))
            models: Mapping[str, int | None] = {}
            with suppress(Unreachable):
                if client.request("/health").status in (200, 404):  # 404: the server has no such page
                    models = parse_models(client.request("/v1/models"))
            if not any("{name}" in word for word in self._launch.command):  # the server chooses the name itself
                self.model = next(iter(models), self.name)
            if self.model in models:
                self.seconds_to_ready = time.monotonic() - self._began
                self._answered = True
                return
            if time.monotonic() - began > self._settings.startup_timeout:
                cause = root_cause(self._text())  # read before stopping the server, which adds lines of its own
                self.stop()
                raise ServerEnded(
                    f"not ready within {self._settings.startup_timeout:g} s; last log line: {cause}", "machine", None
                )
            time.sleep(_PAUSE)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    def has_died(self, within: float = 5.0) -> bool:
        """Return whether the server is not running, or exits within ``within`` seconds.

        Use this after a failed connection, because the connections of a dying server fail shortly before its exit
        shows.
        """
        return self._process is None or self._process.ends(within)

    def diagnose(self) -> ServerEnded:
        """Stop the server, and return an error with the reason why it ended."""
        self.stop()
        returncode = self._end.returncode
        if self._end.reason == "limit":
            limit = self._settings.timeout
            return ServerEnded(f"the checks took longer than {limit:g} s", "machine", returncode)
        if self._not_started:
            return ServerEnded(self._not_started, "machine", None)
        cause = root_cause(self._text())
        return ServerEnded(cause, assign_blame(cause, returncode, had_answered=self._answered), returncode)

    def stop(self) -> None:
        """End the server and all of its children, if it runs, and release the GPUs."""
        if self._process is not None:
            self._end = self._process.end()
            self._process = None
        self._gpus.release()  # even if an error prevented the start

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:  # a port on which no process listens at the moment
            self._port = int(listener.getsockname()[1])
        self._log.write_bytes(b"")
        self._began = time.monotonic()
        with self._log.open("ab") as output:
            try:
                self._gpus.release()  # from an earlier try
                self._gpus = acquire_gpus()
                self._process = SupervisedProcess(
                    self._launch.at(self._port, self.name),
                    self._launch.environment,
                    output,
                    ProcessOptions(
                        "serve",
                        grace=self._grace,
                        limit=max(1.0, self._deadline - time.monotonic()),
                        # Our requests must reach the server.
                        confinement=confinement(
                            read=self._launch.readable(), network=True, memory=memory_of_child(None)
                        ),
                        short_paths=True,
                        measured=True,
                        inherited=self._gpus.descriptors,
                    ),
                )
            except NotStarted as error:
                self._gpus.release()
                self._not_started = str(error)

    def _text(self) -> str:
        """Return the server's log, or only its start and end if it is very long."""
        try:
            content = self._log.read_bytes()
        except OSError:
            return ""
        if len(content) > 2 * _TAIL:
            content = content[:_TAIL] + b"\n" + content[-_TAIL:]
        return content.decode(errors="replace")


# Prefixes that loggers put before a message: '(EngineCore pid=7) ERROR 11-20 11:01:16 [core.py:842] '.
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:[A-Z]+\s+\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\s+)?(?:\[[^\]]*\]\s*)?")
_NOT_ERROR = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b")
_RAISED = re.compile(
    r"(?:^|\s)((?:(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)|error|fatal error): .+)$|"
    r"^(\w.* died unexpectedly \(exit code: -\d+\))"
)
# Messages about an end whose cause is elsewhere in the log.
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|Engine core proc|EngineDeadError|EngineCore encountered|"
    r"WorkerProc initialization failed|See root cause above|Failed core proc|CancelledError|RuntimeError: cancelled$"
)
# Messages that interpreters print at exit.
_PRINTED_AT_EXIT = re.compile(r"resource_tracker|warnings\.warn\(|nanobind|^ - (?:leaked|\.\.\.)")
_LONGEST = 400

# Limits of the machine. A server can reach them even after it has answered.
_LIMITS = re.compile(
    r"out of memory|OutOfMemory|MemoryError|Cannot allocate memory|bad_alloc|ENOMEM|No space left on device|"
    r"Free memory on device|No available memory for the cache|KV cache is needed|VLLM_CPU_KVCACHE_SPACE|"
    r"not enough memory|Available (?:CPU )?memory|Unsupported CPU attention configuration|"
    r"died unexpectedly \(exit code: -(?:4|9)\)"
)
_MACHINE = re.compile(
    r"No CUDA|CUDA driver|CUDA[- ]capable device|CUDA error|cudaError|libcuda|NVML|NCCL|Failed to infer device type|"
    r"Too many open files|Resource temporarily unavailable|No such file or directory|Permission denied|not enough GPUs|"
    r"ModuleNotFoundError|ImportError|cannot open shared object|Exec format error|[Aa]ddress already in use|"
    r"World size .* larger than"
)
_SETTINGS = re.compile(
    r"unrecognized arguments|invalid choice|expected one argument|the following arguments are required|"
    r"argument --?[\w-]+: |Extra inputs are not permitted|greater than the derived max_model_len"
)
# Another process listens on the port.
PORT_TAKEN = re.compile(r"[Aa]ddress already in use|EADDRINUSE")


def root_cause(log: str) -> str:
    """Return the line of a log that says why a server ended.

    This is the first error that is not the consequence of another one, or the last line of a log without errors.
    """
    errors = []
    for line in log.splitlines():
        if _NOT_ERROR.search(line[:80]):
            continue
        if match := _RAISED.search(_PREFIX.sub("", line.strip())):
            errors.append((match[1] or match[2]).strip())
    causes = [error for error in errors if not _CONSEQUENCE.search(error)]
    if causes or errors:
        return (causes or errors)[0][:_LONGEST]
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _PRINTED_AT_EXIT.search(line)]
    return _PREFIX.sub("", lines[-1])[:_LONGEST] if lines else "the log is empty"


def assign_blame(cause: str, returncode: int | None, *, had_answered: bool) -> Blame:
    """Decide whether the model, the machine or the settings are to blame for the end of a server.

    The machine is to blame if it lacks memory, a GPU or the server itself, and after SIGKILL, which the kernel sends
    when memory is short. The settings are to blame if the server does not know its arguments. Otherwise the model is.

    After the server has answered, only two ends are not the model's fault: SIGKILL, and a limit of the machine, such as
    memory (also of a worker), a kernel that this build of the server has only for GPUs, or an instruction that the
    processor lacks (SIGILL).

    ``cause`` is the result of ``root_cause``. ``returncode`` is negative for a signal.
    """
    if _LIMITS.search(cause) or returncode == -9:
        return "machine"
    if had_answered:
        return "model"
    if _SETTINGS.search(cause):
        return "settings"
    return "machine" if _MACHINE.search(cause) else "model"

"""A server as a process of ours: started on a free port, awaited, and ended with everything it started.

::

    with ServerProcess(launch, log, settings) as server:
        server.await_ready()
        ...                       # server.url, server.model
    server.peak_memory            # and no process, port or temporary file is left
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from mergegate.tasks.http import Unreachable
from mergegate.tasks.sandbox import Confinement, GpuLease, NotStarted, ProcessEnd, SupervisedProcess, acquire_gpus
from mergegate.tasks.serve.client import Client
from mergegate.tasks.serve.launch import Launch
from mergegate.tasks.serve.server_log import Blame, blame, port_was_taken, root_cause
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.stage import home, memory_of_child

GRACE = 20.0  # seconds that a server has to end by itself
_TRIES = 3  # with another port each, should somebody have been quicker
_PAUSE = 0.1
_TAIL = 1 << 20  # bytes of a log in which a cause is looked for, at its start and at its end


class ServerEnded(Exception):
    """The server is no more, or does not get ready; the message is the cause that its log gives."""

    def __init__(self, cause: str, blame: Blame, returncode: int | None) -> None:
        super().__init__(cause)
        self.cause, self.blame, self.returncode = cause, blame, returncode


class ServerProcess:
    """One server. Entering starts it, leaving ends it; neither waits for it to be ready."""

    def __init__(self, launch: Launch, log: Path, settings: ServeSettings, grace: float = GRACE) -> None:
        self._launch, self._log, self._settings, self._grace = launch, log, settings, grace
        self._port = 0
        self._began = 0.0  # when the process was started
        self._deadline = time.monotonic() + settings.total_within
        self._process: SupervisedProcess | None = None
        self._gpus = GpuLease((), lambda: None)
        self._not_started = ""
        self._end = ProcessEnd()
        self._answered = False
        self.name = f"mergegate-{secrets.token_hex(4)}"  # so that no other server can be taken for this one
        self.model = self.name  # what it calls the model
        self.seconds_to_ready: float | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def peak_memory(self) -> int | None:
        """Bytes, known when it has ended."""
        return self._end.peak_memory or None

    @property
    def peak_gpu_memory(self) -> int | None:
        """Bytes on all GPUs, known when it has ended; None where there is no GPU, or nothing was on it."""
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
        """Wait until the server answers and knows its model.

        Args:
            on_wait: Told now and then how many seconds that has taken.

        Raises:
            ServerEnded: when it exits, or is not ready in time; then it is ended.
        """
        began, tries = time.monotonic(), 1
        while True:
            on_wait(time.monotonic() - began)
            if not self.alive:
                if port_was_taken(self._text()) and tries < _TRIES:
                    tries += 1
                    self.stop()
                    self._start()
                    continue
                raise self.ended()
            if self._is_ready():
                self.seconds_to_ready = time.monotonic() - self._began
                self._answered = True
                return
            if time.monotonic() - began > self._settings.ready_within:
                cause = root_cause(self._text())  # before it is ended, which it will talk about, too
                self.stop()
                raise ServerEnded(f"not ready in {self._settings.ready_within:g} s; last: {cause}", "machine", None)
            time.sleep(_PAUSE)

    @property
    def alive(self) -> bool:
        """Whether the server runs, or has not been cleared away yet."""
        return self._process is not None and self._process.alive

    def has_died(self, within: float = 5.0) -> bool:
        """Whether the server ends by itself within some seconds: a refused connection comes before the news of it."""
        return self._process is None or self._process.ends(within)

    def ended(self) -> ServerEnded:
        """Why the server is no more."""
        self.stop()
        returncode = self._end.returncode
        if self._end.why == "limit":
            limit = self._settings.total_within
            return ServerEnded(f"took longer than {limit:g} s altogether", "machine", returncode)
        if self._not_started:
            return ServerEnded(self._not_started, "machine", None)
        cause = root_cause(self._text())
        return ServerEnded(cause, blame(cause, returncode, had_answered=self._answered), returncode)

    def stop(self) -> None:
        """End the server and everything it started; harmless if there is nothing to end."""
        if self._process is not None:
            self._end = self._process.end()
            self._process = None
            self._gpus.release()

    def _start(self) -> None:
        self._port = free_port()
        self._log.write_bytes(b"")
        self._began = time.monotonic()
        with self._log.open("ab") as output:
            try:
                self._gpus.release()  # of an earlier try
                self._gpus = acquire_gpus()
                self._process = SupervisedProcess(
                    self._launch.at(self._port, self.name),
                    self._launch.environment,
                    output,
                    name="serve",
                    confinement=Confinement(
                        hide=(str(home() / "prefect"),),
                        network=True,  # we must reach it
                        memory=memory_of_child(None),
                    ),
                    grace=self._grace,
                    limit=max(1.0, self._deadline - time.monotonic()),
                    short_paths=True,
                    measured=True,
                    inherited=self._gpus.descriptors,
                )
            except NotStarted as error:
                self._gpus.release()
                self._not_started = str(error)

    def _is_ready(self) -> bool:
        client = Client(self.url, timeout=min(5.0, self._settings.answer_within))
        try:
            if client.health() not in (200, 404):  # 404: a server without that page
                return False
            models = client.models()
        except Unreachable:
            return False
        if self._launch.takes_a_name:
            return self.name in models
        self.model = next(iter(models), self.name)
        return bool(models)

    def _text(self) -> str:
        """The log; of a very long one, start and end."""
        try:
            content = self._log.read_bytes()
        except OSError:
            return ""
        if len(content) > 2 * _TAIL:
            content = content[:_TAIL] + b"\n" + content[-_TAIL:]
        return content.decode(errors="replace")


def free_port() -> int:
    """A port of this machine on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

"""Mark server processes, and find processes and files that outlive them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

from patience import HANG_S

from mergegate.tasks.quality.serve.launch import Launch

OPENAI_SERVER = Path(__file__).parents[1] / "openai_server.py"
MARK = "MERGEGATE_TEST_SERVER"  # Variable in the environment of every process that a server starts.


class Traces:
    """Finds processes and files that the servers of this test have left behind."""

    def __init__(self, mark: str, temporary: Path) -> None:
        self.mark, self.temporary = mark, temporary

    def processes(self) -> list[int]:
        """Return the ids of running processes with the mark in their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                marked = entry.name.isdigit() and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
            except (OSError, IndexError):
                continue
            if marked and state != "Z":
                found.append(int(entry.name))
        return found

    def wait_until_gone(self) -> list[int]:
        """Return the processes that are still running after a long wait."""
        await_condition(lambda: not self.processes())
        return self.processes()

    def files(self) -> list[str]:
        """Return the remaining temporary files and shared-memory segments."""
        # The supervisor deletes files after the last process has ended.
        await_condition(lambda: not list(self.temporary.iterdir()))
        return [*map(str, self.temporary.iterdir()), *map(str, Path("/dev/shm").glob(f"{self.mark}-*"))]


def await_condition(holds: Callable[[], bool]) -> bool:
    """Wait until the condition holds, and return whether it does."""
    deadline = time.monotonic() + HANG_S
    while not holds() and time.monotonic() < deadline:
        pause(0.02)
    return holds()


def pause(seconds: float) -> None:
    """Yield the CPU to the processes of the test."""
    threading.Event().wait(seconds)


def fake_server(traces: Traces, *arguments: str) -> Launch:
    command = (sys.executable, str(OPENAI_SERVER), "--port", "{port}", "--name", "{name}", *arguments)
    return Launch(command, {"PATH": os.environ["PATH"], MARK: traces.mark})


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


FLOW = """
    import sys
    from pathlib import Path
    from mergegate.tasks.quality.serve.launch import Launch
    from mergegate.tasks.quality.serve.process import ServerProcess
    from mergegate.tasks.quality.serve.settings import ServeSettings
    log, mark, *command = sys.argv[1:]
    launch = Launch(tuple(command), {"PATH": "/usr/bin:/bin", "%s": mark})
    with ServerProcess(launch, Path(log), ServeSettings(), grace=2) as server:
        print(server.url, flush=True)
        server.await_ready()
        print("ready", flush=True)
        sys.stdin.read()
"""


def flow(log: Path, traces: Traces, launch: Launch) -> subprocess.Popen[str]:
    """Start a separate process that runs a server, as a flow does."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FLOW % MARK), str(log), traces.mark, *launch.command],
        cwd=OPENAI_SERVER.parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

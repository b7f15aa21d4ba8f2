"""Mark server processes, and find processes and files that outlive them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

from patience import HANG_S

from mergegate.tasks.serve.launch import Launch

STAND_IN = Path(__file__).with_name("stand_in.py")
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

    def wait_until_gone(self, seconds: float = HANG_S) -> list[int]:
        """Return the processes that are still running after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            _look_again()
        return self.processes()

    def wait_for(self, count: int, seconds: float = HANG_S) -> None:
        """Wait until at least `count` processes are running."""
        deadline = time.monotonic() + seconds
        while len(self.processes()) < count:
            assert time.monotonic() < deadline, f"{len(self.processes())} processes, not {count}"
            _look_again()

    def files(self) -> list[str]:
        """Return the remaining temporary files and shared-memory segments."""
        deadline = time.monotonic() + HANG_S  # The supervisor deletes files after the last process has ended.
        while list(self.temporary.iterdir()) and time.monotonic() < deadline:
            _look_again()
        return [*map(str, self.temporary.iterdir()), *map(str, Path("/dev/shm").glob(f"{self.mark}-*"))]


def _look_again() -> None:
    """Yield the CPU to the processes that the test waits for."""
    threading.Event().wait(0.02)


def stand_in(traces: Traces, *arguments: str) -> Launch:
    command = (sys.executable, str(STAND_IN), "--port", "{port}", "--name", "{name}", *arguments)
    return Launch(command, {"PATH": os.environ["PATH"], MARK: traces.mark})


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


FLOW = """
    import sys
    from pathlib import Path
    from mergegate.tasks.serve.launch import Launch
    from mergegate.tasks.serve.process import ServerProcess
    from mergegate.tasks.serve.settings import ServeSettings
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
        cwd=STAND_IN.parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

"""Run a project with its own Prefect server through the commands that a user types."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from loopback import answering
from patience import HANG_S
from prefect.client.orchestration import SyncPrefectClient

from mergegate.flows.prefect_api import Site, site_client

PROJECT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MERGEGATE = [sys.executable, "-c", "from mergegate.flows.cli import main; main()"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def bare_environment(root: Path, **more: str) -> dict[str, str]:
    """Return an environment without Prefect or mergegate settings that imports mergegate from this checkout."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MERGEGATE_"))}
    paths = {"PYTHONPATH": str(PROJECT), "PATH": f"{root / '.venv' / 'bin'}:{BIN}:{os.environ['PATH']}"}
    quick = {"HF_HUB_OFFLINE": "1", "PREFECT_WORKER_QUERY_SECONDS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    return {**known, **paths, **quick, **more}


@contextmanager
def in_a_terminal_of_its_own(command: str | list[str], root: Path, environment: dict[str, str]) -> Iterator[Path]:
    """Run a command in its own session until the block ends, and yield its log file."""
    words = ["bash", "-ec", command] if isinstance(command, str) else command
    log = root / f"{len(list(root.glob('terminal-*.log')))}".join(("terminal-", ".log"))
    with log.open("w") as out:
        running = subprocess.Popen(words, cwd=root, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        yield log
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)
            try:
                running.wait(HANG_S)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def until(true: Callable[[], object], what: str, log: Path | None = None) -> None:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        if true():
            return
        time.sleep(0.2)
    said = f"\n{log.read_text()[-4000:]}" if log else ""
    raise AssertionError(f"waited in vain for {what}{said}")


def answers(port: int) -> bool:
    with socket.socket() as there:
        return there.connect_ex(("127.0.0.1", port)) == 0


class Received:
    """JSON messages that a webhook on loopback received."""

    def __init__(self, port: int) -> None:
        self.url, self.messages = f"http://127.0.0.1:{port}/hook", list[dict[str, str]]()

    def texts(self) -> list[str]:
        return [one["text"] for one in self.messages]


@contextmanager
def webhook() -> Iterator[Received]:
    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # name required by http.server
            received.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Discard the log line."""

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Hook)) as server:
        received = Received(server.server_port)
        yield received


def site_of(root: Path, port: int) -> Site:
    """Return the site of a server that has been started in ``root``."""
    secret = (root / ".mergegate" / "prefect" / "auth").read_text()
    return Site(root, root / ".mergegate", f"http://127.0.0.1:{port}", secret)


@contextmanager
def asked(root: Path, port: int) -> Iterator[SyncPrefectClient]:
    with site_client(site_of(root, port)) as client:
        yield client

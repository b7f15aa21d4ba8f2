"""Run a real server as a process of its own, and wait until it answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from patience import HANG_S


@contextmanager
def running_server(
    directory: Path, command: Callable[[int], list[str]], health: str, **environment: str
) -> Iterator[str]:
    """Run the command for a free port, in ``directory``, and yield its URL once ``health`` answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    directory.mkdir(parents=True, exist_ok=True)
    url, log = f"http://127.0.0.1:{port}", directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(port), stdout=output, stderr=output, cwd=directory, start_new_session=True,
            env={**os.environ, **environment},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            try:
                urlopen(f"{url}{health}").close()
                break
            except OSError:
                time.sleep(0.05)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=HANG_S)

"""The commands of the README, word for word: a server, the deployments, a worker, and a run that it carries out."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from demo_project import make_project
from patience import HANG_S
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]


def blocks(heading: str) -> list[str]:
    """The code blocks below a heading of the README."""
    section = (PROJECT / "README.md").read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A project as a person has it, with its environment installed."""
    make_project(tmp_path)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "prefect.yaml"):
        shutil.copy(PROJECT / name, tmp_path / name)
        os.utime(tmp_path / name, (0, 0))  # older than the environment: nothing is installed again
    environment = tmp_path / ".venv"
    environment.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    (environment / "ready").touch()
    return tmp_path


def bare_environment(port: int) -> dict[str, str]:
    """What a person has who never heard of Prefect; another port, since the usual one may be taken."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MERGEGATE_"))}
    return {**known, "PORT": str(port), "HF_HUB_OFFLINE": "1", "PREFECT_WORKER_QUERY_SECONDS": "1"}


@contextmanager
def in_a_terminal_of_its_own(command: str, place: Path, environment: dict[str, str]) -> Iterator[None]:
    with (place / f"{command.replace(' ', '-')}.log").open("w") as log:
        running = subprocess.Popen(
            ["bash", "-c", command], cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        running.wait(HANG_S)


def until(true: object, what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        if true():  # type: ignore[operator]  # called until it is
            return
        time.sleep(0.2)
    raise AssertionError(f"waited in vain for {what}")


def test_every_night_word_for_word(clone: Path) -> None:
    services, by_hand = blocks("Every night")
    server, deploy, worker = services.splitlines()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = bare_environment(port)
    by_hand = by_hand.replace("4200", str(port)).replace("demo.yaml", "demo-forbidden.yaml")  # ends in a second

    def answers() -> bool:
        with socket.socket() as there:
            return there.connect_ex(("127.0.0.1", port)) == 0

    def run(commands: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", commands], cwd=clone, env=environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    with in_a_terminal_of_its_own(server, clone, environment):
        until(answers, "the server")
        until(lambda: "release/nightly" in run(deploy), "the deployments")
        with in_a_terminal_of_its_own(worker, clone, environment):
            assert "release" in run(by_hand)
            secret = (clone / ".mergegate" / "prefect" / "auth").read_text()
            address = {PREFECT_API_URL: f"http://127.0.0.1:{port}/api", PREFECT_API_AUTH_STRING: secret}
            with (
                temporary_settings(address),
                get_client(sync_client=True) as client,
            ):

                def ended() -> bool:
                    return any(run.state is not None and run.state.name == "Refused" for run in client.read_flow_runs())

                until(ended, "the run to end")

"""The commands of the README, word for word: start a server, create deployments, start a worker, and run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from demo_project import make_project
from patience import HANG_S
from served_site import PROJECT, answers, asked, bare_environment, free_port, in_a_terminal_of_its_own, until

pytestmark = pytest.mark.slow


def blocks(heading: str) -> list[str]:
    """Return the code blocks below a heading of the README."""
    section = (PROJECT / "README.md").read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a project as a user would have it, with its environment installed."""
    make_project(tmp_path)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "prefect.yaml", "schedules.yaml"):
        shutil.copy(PROJECT / name, tmp_path / name)
        os.utime(tmp_path / name, (0, 0))  # Older than the environment, so nothing is installed again.
    environment = tmp_path / ".venv"
    environment.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    (environment / "ready").touch()
    return tmp_path


def test_every_night_word_for_word(clone: Path) -> None:
    services, by_hand = blocks("Every night")
    server, deploy, worker = services.splitlines()
    port = free_port()
    environment = bare_environment(clone, PORT=str(port))
    forbidden = "profiles/demo-forbidden.yaml"  # This run ends within a second.
    by_hand = by_hand.replace("trigger demo\n", f"trigger {forbidden}\n").replace("profiles/demo.yaml", forbidden)

    def run(commands: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", commands], cwd=clone, env=environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    with in_a_terminal_of_its_own(server, clone, environment) as log:
        until(lambda: answers(port), "the server", log)
        assert "release/demo" in run(deploy)
        with in_a_terminal_of_its_own(worker, clone, environment) as work:
            assert "release/release" in run(by_hand)
            with asked(clone, port) as client:

                def refused() -> int:
                    return sum(run.state is not None and run.state.name == "Refused" for run in client.read_flow_runs())

                until(lambda: refused() == 2, "the runs to end", work)

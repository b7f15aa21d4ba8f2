"""Every night: a real server on loopback, the deployments of prefect.yaml, a schedule that fires, a run by hand.

All of it offline, with the commands a person uses (`make server`, `make deploy`, `make worker`).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from demo_project import make_project
from patience import HANG_S

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


class Site:
    """A project directory of its own with a Prefect server for it."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self.port = root, port
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
            "PREFECT_HOME": str(root / ".mergegate" / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
            "DO_NOT_TRACK": "1",
            "MERGEGATE_HOME": str(root / ".mergegate"),
            "MERGEGATE_ROOT": str(root),
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
        }

    def run(self, *command: str, code: int = 0) -> str:
        """A command in the project; what it printed. It must exit with ``code``."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def work_off(self) -> None:
        """A worker that carries out what is due, waits for it, and goes."""
        self.run("prefect", "worker", "start", "--pool", "mergegate", "--run-once")

    def ask(self, what: str) -> list[dict[str, object]]:
        """All ``flow_runs`` or ``artifacts`` that the server knows."""
        request = urllib.request.Request(
            f"{self.environment['PREFECT_API_URL']}/{what}/filter",
            data=b"{}",
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            found: list[dict[str, object]] = json.load(answer)
        return found

    def flow_runs(self) -> list[dict[str, object]]:
        return self.ask("flow_runs")

    def release_digest(self) -> str:
        """One hash over every file of the latest release of the demo."""
        latest = (self.root / "releases" / "demo" / "latest").resolve()
        running = hashlib.sha256()
        for file in sorted(path for path in latest.rglob("*") if path.is_file()):
            running.update(file.relative_to(latest).as_posix().encode() + file.read_bytes())
        return running.hexdigest()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A server with nothing deployed to it."""
    with _served(tmp_path) as place:
        yield place


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with the deployments as they are shipped."""
    with _served(tmp_path_factory.mktemp("deployed")) as place:
        _deploy(place)
        yield place


@contextmanager
def _served(root: Path) -> Iterator[Site]:
    make_project(root)
    (root / ".mergegate" / "prefect").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = Site(root, port)
    server = subprocess.Popen(
        [str(BIN / "prefect"), "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        cwd=root,
        env=place.environment,
        stdout=(root / "server.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        _until_healthy(place, server)
        yield place
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(HANG_S)


def _until_healthy(site: Site, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        assert server.poll() is None, (site.root / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{site.environment['PREFECT_API_URL']}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not answer")


def _deploy(site: Site, *, every_seconds: int | None = None) -> None:
    """`make deploy`, with the nightly schedule brought forward when asked."""
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())
    if every_seconds is not None:
        for deployment in deployments["deployments"]:
            if deployment["name"] == "nightly":
                deployment["schedules"] = [{"interval": every_seconds, "slug": "often", "active": True}]
    (site.root / "prefect.yaml").write_text(yaml.safe_dump(deployments))
    site.run("prefect", "work-pool", "create", "mergegate", "--type", "process")
    site.run("prefect", "--no-prompt", "deploy", "--all")


def test_by_hand_and_by_schedule_the_same_release_comes_out_as_by_mergegate_run(site: Site) -> None:
    _deploy(site, every_seconds=20)

    site.run("prefect", "deployment", "run", "release/release", "-p", 'profile="profiles/demo.yaml"')
    ended: list[dict[str, object]] = []
    for _ in range(12):  # a worker takes what is due within seconds; the schedule's turn comes every 20
        site.work_off()
        ended = [run for run in site.flow_runs() if run["state_type"] == "COMPLETED"]
        if any(run["auto_scheduled"] for run in ended):
            break
    by_worker = site.release_digest()
    assert {run["state_name"] for run in ended} <= {"Released", "NothingNew"}
    assert any(run["auto_scheduled"] for run in ended), "no scheduled run has ended in a release"
    assert any(not run["auto_scheduled"] for run in ended), "the run by hand has not ended in a release"

    pages = [artifact["data"] for artifact in site.ask("artifacts") if artifact["key"] == "release-demo"]
    assert pages, "Prefect's pages do not show the verdict"
    assert all("| reverse |" in str(page) and "✓ no worse" in str(page) for page in pages)

    # Nothing of what the worker made may help the second maker.
    (site.root / ".mergegate" / "store").rename(site.root / "store-of-the-worker")
    (site.root / "releases").rename(site.root / "releases-of-the-worker")
    site.run("mergegate", "run", "profiles/demo.yaml")
    assert site.release_digest() == by_worker


def test_the_nightly_deployment_has_its_cron(deployed: Site) -> None:
    shown = deployed.run("prefect", "deployment", "inspect", "release/nightly", "--output", "json")
    schedules = json.loads(shown)["schedules"]
    assert [schedule["schedule"]["cron"] for schedule in schedules] == ["0 3 * * *"]


def test_a_profile_with_a_misspelt_key_is_refused_before_a_run_exists(deployed: Site) -> None:
    profile = 'profile={"name": "x", "recepe": "y"}'
    said = deployed.run("prefect", "deployment", "run", "release/release", "-p", profile, code=1)
    assert "recepe" in said
    assert [run for run in deployed.flow_runs() if not run["auto_scheduled"]] == []

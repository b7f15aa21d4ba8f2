"""Projects for the tests of flows: an empty one, and one in which the demo has been released."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from demo_project import Printed, Project, make_project


@pytest.fixture
def project(tmp_path: Path, prefect_api: None) -> Project:
    """A project in which nothing has run yet."""
    return make_project(tmp_path)


@pytest.fixture(scope="session")
def demo_release(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Path:
    """Where the demo has been released once for all tests, by whichever of their processes comes first."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    place = shared / "demo-release"
    with (shared / "demo-release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "printed.json").exists():
            result = make_project(place).mergegate("run", "profiles/demo.yaml")
            (place / "printed.json").write_text(json.dumps([result.exit_code, result.output]))
    return place


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, demo_release: Path) -> tuple[Project, Printed]:
    """A project of this module's own in which the demo has been released, and what that printed."""
    root = tmp_path_factory.mktemp("released") / "project"
    shutil.copytree(demo_release, root, symlinks=True)
    return Project(root), Printed(*json.loads((root / "printed.json").read_text()))

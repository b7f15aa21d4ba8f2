"""Projects for the tests of flows: an empty one, and one in which the demo has been released."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_project import Project, make_project
from typer.testing import Result


@pytest.fixture
def project(tmp_path: Path, prefect_api: None) -> Project:
    """A project in which nothing has run yet."""
    return make_project(tmp_path)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> tuple[Project, Result]:
    """A project in which the demo has been released, and what that printed."""
    project = make_project(tmp_path_factory.mktemp("released"))
    return project, project.mergegate("run", "profiles/demo.yaml")

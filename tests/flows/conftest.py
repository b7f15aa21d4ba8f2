"""Fixtures for the flow tests: an empty project, and projects in which the demo has been released."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_project import SOURCES, Printed, Project, make_project
from kept import digest_of, kept
from optional_stages import run_with_everything

TESTS = Path(__file__).resolve().parents[1]
VARIANTS = "variants: [{format: rounded, bits: [8, 6]}, {format: rounded, bits: 7, suffix: Second}]\n"
SERVERS = (TESTS / "judge", TESTS / "serve", Path(__file__).with_name("optional_stages.py"))


@pytest.fixture
def project(tmp_path: Path, prefect_api: None) -> Project:
    """Return a project in which nothing has run yet."""
    return make_project(tmp_path)


@pytest.fixture(scope="session")
def demo_release(request: pytest.FixtureRequest, prefect_api: None) -> Path:
    """Return a project directory with a released demo, cached across tests and across test runs."""

    def make(place: Path) -> None:
        result = make_project(place).mergegate("run", "profiles/demo.yaml")
        assert result.exit_code == 0, result.output
        (place / "printed.json").write_text(json.dumps([result.exit_code, result.output]))

    return kept(request.config, "demo-release", digest_of((*SOURCES, Path(__file__))), make)


@pytest.fixture(scope="session")
def released_with_everything(request: pytest.FixtureRequest, demo_release: Path) -> Path:
    """Return a project directory in which the demo has also been released with every optional stage."""

    def make(place: Path) -> None:
        shutil.copytree(demo_release, place, symlinks=True)
        result = run_with_everything(Project(place))
        assert result.exit_code == 0, result.output
        (place / "outcome.json").write_text(result.stdout)

    return kept(request.config, "demo-with-everything", digest_of((*SOURCES, Path(__file__), *SERVERS)), make)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, demo_release: Path) -> tuple[Project, Printed]:
    """Return this module's own copy of the project with the released demo, and the output of its run."""
    root = tmp_path_factory.mktemp("released") / "project"
    shutil.copytree(demo_release, root, symlinks=True)
    return Project(root), Printed(*json.loads((root / "printed.json").read_text()))


@pytest.fixture(scope="module")
def demo(released: tuple[Project, Printed]) -> Project:
    """Return this module's own copy of the project with the released demo."""
    return released[0]


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register the variant format ``rounded`` for this module."""
    if (folder := str(TESTS / "variants")) not in sys.path:
        sys.path.append(folder)
    from rounded_format import rounded_registered

    with rounded_registered(tmp_path_factory.mktemp("rounded") / "site"):
        yield


@pytest.fixture(scope="module")
def published_variants(
    request: pytest.FixtureRequest, rounded: None, demo_release: Path, tmp_path_factory: pytest.TempPathFactory
) -> Project:
    """Return this module's own copy of the project of the released demo, which has released variants in two places.

    ``outcome.json`` is the outcome of the run that released them.
    """

    def make(place: Path) -> None:
        shutil.copytree(demo_release, place, symlinks=True)
        project = Project(place)
        (place / "profiles" / "demo.yaml").open("a").write(VARIANTS)
        result = project.mergegate("run", "profiles/demo.yaml", "--json")
        assert result.exit_code == 0, result.output
        (place / "outcome.json").write_text(result.stdout)

    sources = (*SOURCES, Path(__file__), TESTS / "variants" / "rounded_format.py")
    there = kept(request.config, "demo-with-variants", digest_of(sources), make)
    root = tmp_path_factory.mktemp("published") / "project"
    shutil.copytree(there, root, symlinks=True)
    return Project(root)

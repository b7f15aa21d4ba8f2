"""Damaged state files: the next run recovers and gives the same release."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from demo_project import Project, expect
from faults import files_below
from garbage import DAMAGE
from test_embedded_api import start_api

LASTING = [name for name in DAMAGE if name != "unreadable"]


def state_files(project: Project) -> list[Path]:
    """Return all files below the project's home except those of Prefect, which another process owns here."""
    found = (path for path in sorted(project.home.rglob("*")) if path.is_file())
    return [path for path in found if "prefect" not in path.relative_to(project.home).parts]


def run(project: Project) -> str:
    result = expect(project.mergegate("run", "profiles/demo.yaml"), 0)
    return result.output


def version_of(project: Project) -> str:
    return project.latest.resolve().name


@pytest.fixture
def copied(demo: Project, tmp_path: Path) -> Project:
    """Return this test's own copy of the project with the released demo."""
    shutil.copytree(demo.root, tmp_path / "project", symlinks=True)
    return Project(tmp_path / "project")


@pytest.mark.proof
def test_everything_is_damaged_at_once_and_the_release_is_the_same_to_the_byte(copied: Project) -> None:
    before, release = version_of(copied), files_below(copied.latest)
    shutil.rmtree(copied.root / "releases")
    for path, name in zip(state_files(copied), LASTING * 99, strict=False):
        DAMAGE[name](path)
    run(copied)
    assert version_of(copied) == before
    assert files_below(copied.latest) == release
    assert copied.mergegate("doctor").exit_code == 0
    assert "✓" not in "".join(line[:4] for line in run(copied).splitlines())


def lose_a_table(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("DROP TABLE flow_run")
        connection.commit()


PREFECT = {"garbage": DAMAGE["garbage"], "without a table": lose_a_table}


@pytest.mark.proof
@pytest.mark.parametrize("kind", PREFECT)
def test_prefect_runs_whatever_has_become_of_its_database(prefect_database: Path, tmp_path: Path, kind: str) -> None:
    database = tmp_path / "prefect" / "prefect.db"
    database.parent.mkdir()
    shutil.copy(prefect_database, database)
    PREFECT[kind](database)
    done = start_api(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs: 0" in done.stdout
    assert tmp_path.joinpath("prefect").stat().st_mode & 0o077 == 0

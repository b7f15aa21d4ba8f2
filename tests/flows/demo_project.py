"""Create a project directory with the shipped profiles and run the command line in this process."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mergegate.flows.cli.app import app

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
# Inputs of a demo release. A cached release is rebuilt if one of them changes.
SOURCES = (PROFILES, *(PROFILES.parent / floor for floor in ("flows", "tasks", "merge_core")), Path(__file__))


@dataclass(frozen=True)
class Printed:
    """Exit code and output of a command that ran earlier, possibly in another process."""

    exit_code: int
    output: str


def expect(result: Result, code: int, *words: str) -> Result:
    """Require the exit code of a command and words in its output, and return its result."""
    assert (result.exit_code, [word for word in words if word not in result.output]) == (code, []), result.output
    return result


@dataclass
class Project:
    """A directory with the shipped profiles and its own state and releases."""

    root: Path
    runner: CliRunner = field(default_factory=CliRunner)

    def mergegate(self, *arguments: str, columns: int = 1000) -> Result:
        """Run a mergegate command in this process and in this project. An unexpected exception fails the test.

        By default, lines are too long to wrap, so that they match the expected text.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.root)
            patch.setenv("MERGEGATE_HOME", str(self.home))
            patch.setenv("COLUMNS", str(columns))
            result = self.runner.invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    @property
    def home(self) -> Path:
        return self.root / ".mergegate"

    @property
    def latest(self) -> Path:
        """Directory of the demo release that is currently published."""
        return self.root / "releases" / "demo" / "latest"

    def artifacts(self, stage: str) -> set[str]:
        """Return the keys of the artifacts that a stage has built so far."""
        place = self.home / "store" / stage
        return {path.name for path in place.iterdir()} if place.is_dir() else set()

    def edit(self, profile: str, old: str, new: str) -> str:
        """Copy a shipped profile, replace ``old`` with ``new``, give it its own target, and return its path."""
        text = (self.root / "profiles" / profile).read_text()
        assert old in text
        text = text.replace(old, new).replace("../releases/", "../releases/edited-")
        (self.root / "profiles" / f"edited-{profile}").write_text(text)
        return f"profiles/edited-{profile}"


def make_project(root: Path) -> Project:
    """Create a project in ``root``.

    Profiles are copied so that ``../releases`` is inside the project. The demo models are shared through a symlink.
    """
    (root / "profiles").mkdir(parents=True)
    for profile in PROFILES.glob("*.yaml"):
        shutil.copy(profile, root / "profiles")
    (root / "profiles" / "demo").symlink_to(PROFILES / "demo")
    return Project(root)

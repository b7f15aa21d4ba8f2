"""A project directory with the shipped profiles in it, and the command line run inside this process."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mergegate.flows.cli.app import app

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
# What a release of the demo hangs on: where one of these has changed, a kept one is made anew.
SOURCES = (PROFILES, *(PROFILES.parent / floor for floor in ("flows", "tasks", "merge_core")), Path(__file__))


@dataclass(frozen=True)
class Printed:
    """How a command ended and what it printed, in another process or long ago."""

    exit_code: int
    output: str


@dataclass
class Project:
    """A directory with the shipped profiles, a state and releases of its own."""

    root: Path
    runner: CliRunner = field(default_factory=CliRunner)

    def mergegate(self, *arguments: str) -> Result:
        """The command, in this process and in this project. An unexpected exception fails the test."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.root)
            patch.setenv("MERGEGATE_HOME", str(self.home))
            patch.setenv("COLUMNS", "120")
            result = self.runner.invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    @property
    def home(self) -> Path:
        return self.root / ".mergegate"

    @property
    def latest(self) -> Path:
        """The demo release that is published now."""
        return self.root / "releases" / "demo" / "latest"

    def artifacts(self, stage: str) -> set[str]:
        """Keys of what a stage has made so far."""
        place = self.home / "store" / stage
        return {path.name for path in place.iterdir()} if place.is_dir() else set()

    def edit(self, profile: str, old: str, new: str) -> str:
        """A copy of a shipped profile with a change in it and a target of its own; its name, to be run."""
        text = (self.root / "profiles" / profile).read_text()
        assert old in text
        text = text.replace(old, new).replace("../releases/", "../releases/edited-")
        (self.root / "profiles" / f"edited-{profile}").write_text(text)
        return f"profiles/edited-{profile}"


def make_project(root: Path) -> Project:
    """Profiles are copied, so that ``../releases`` is the project's own; the family is shared."""
    (root / "profiles").mkdir(parents=True)
    for profile in PROFILES.glob("*.yaml"):
        shutil.copy(profile, root / "profiles")
    (root / "profiles" / "demo").symlink_to(PROFILES / "demo")
    return Project(root)

"""Checkpoints of the demo family for the serving tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from traces import Traces
from typer.testing import CliRunner
from variants import DEMO, copied

from mergegate.flows.cli.app import app


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a valid checkpoint that the test may change."""
    return copied(DEMO / "models" / "reverser", tmp_path / "reverser")


@pytest.fixture(scope="module")
def merge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the merge that the demo releases; tests copy it and do not change it."""
    place = tmp_path_factory.mktemp("merge")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEGATE_HOME", str(place / "state"))
        result = CliRunner().invoke(app, ["merge", str(DEMO / "recipes" / "ties.yaml"), str(place / "merge")])
    assert result.exit_code == 0, result.output
    return place / "merge"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """Give the test its own temporary directory, and mark its server processes."""
    # Not below tmp_path, whose paths are too long for the servers' sockets.
    temporary = Path(tempfile.mkdtemp(prefix="traces-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    found = Traces(temporary.name, temporary)
    yield found
    for pid in found.processes():  # Left over by a failed test.
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(temporary)

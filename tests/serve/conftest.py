"""Checkpoints of the demo family to serve."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from traces import Traces
from variants import DEMO, copied


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A good one, with a chat template, that may be changed."""
    return copied(DEMO / "models" / "reverser", tmp_path / "reverser")


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """A place of its own for temporary files, and a mark for processes."""
    # Not below tmp_path, which is too long for the sockets of servers.
    temporary = Path(tempfile.mkdtemp(prefix="traces-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    found = Traces(temporary.name, temporary)
    yield found
    for pid in found.processes():  # of a test that failed
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(temporary)

"""Whether this system offers what confines a process: an old kernel or a container may not (the log says so)."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from mergegate.tasks.sandbox import Confinement, SupervisedProcess, environment_of_child


@cache
def lacking() -> tuple[str, ...]:
    with tempfile.TemporaryFile() as output:
        wanted = Confinement(memory=1 << 30)
        process = SupervisedProcess(
            [sys.executable, "-c", ""], environment_of_child(), output, name="probe", confinement=wanted
        )
        process.end()
    return process.unconfined


def require_confinement() -> None:
    """Skip the test where the system cannot keep what it promises, which is then not promised."""
    if lacking():
        pytest.skip(f"this system does not confine processes in: {', '.join(lacking())}")


def directory_of_nobody() -> Path:
    """A new directory that is not below those where everybody may write: there the project itself may lie."""
    shared = {Path("/tmp").resolve(), Path(tempfile.gettempdir()).resolve()}
    places = (Path(__file__).resolve().parents[1], Path("/var/tmp"), Path.home())
    own = next(place for place in places if os.access(place, os.W_OK) and not shared & {place, *place.parents})
    return Path(tempfile.mkdtemp(dir=own))

"""Check whether this system can confine a process; old kernels and containers may not support it."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from mergegate.tasks.base.sandbox import Confinement, ProcessOptions, SupervisedProcess, environment_of_child


@cache
def lacking() -> tuple[str, ...]:
    with tempfile.TemporaryFile() as output:
        options = ProcessOptions("probe", confinement=Confinement(memory=1 << 30))
        process = SupervisedProcess([sys.executable, "-c", ""], environment_of_child(), output, options)
        process.end()
    return process.unconfined


def require_confinement() -> None:
    """Skip the test if this system lacks a feature that confinement needs."""
    if lacking():
        pytest.skip(f"this system does not confine processes in: {', '.join(lacking())}")


def directory_of_nobody() -> Path:
    """Return a new directory outside world-writable places, because the project itself may be below one of them."""
    shared = {Path("/tmp").resolve(), Path(tempfile.gettempdir()).resolve()}
    places = (Path(__file__).resolve().parents[1], Path("/var/tmp"), Path.home())
    own = next(place for place in places if os.access(place, os.W_OK) and not shared & {place, *place.parents})
    return Path(tempfile.mkdtemp(dir=own))

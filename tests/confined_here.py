"""Whether this system offers what confines a process: an old kernel or a container may not (the log says so)."""

from __future__ import annotations

import sys
import tempfile
from functools import cache

import pytest

from tasks.outside import Confinement, SupervisedProcess, environment_of_child


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

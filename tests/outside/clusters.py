"""Which clusters the tests can start here, and which processes are ours."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# Ray lives in an environment of its own; where it is asked for, its absence is a failure and no excuse.
KINDS = [
    pytest.param("dask", marks=pytest.mark.slow),
    pytest.param(
        "ray",
        marks=[
            pytest.mark.ray,
            pytest.mark.skipif(
                find_spec("ray") is None and "MERGEGATE_REQUIRE_RAY" not in os.environ, reason="make test-ray"
            ),
        ],
    ),
]


def descendants() -> dict[int, str]:
    """Processes below this one that have not ended: what they were started as, by id. Without the one that Python
    itself keeps for as long as we live, once anything was spawned."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, above = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(above), []).append(int(entry.name))
    found: dict[int, str] = {}
    nodes = [os.getpid()]
    while nodes:
        for pid in children.get(nodes.pop(), []):
            try:
                found[pid] = (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            nodes.append(pid)
    return {pid: what for pid, what in found.items() if "multiprocessing.resource_tracker" not in what}

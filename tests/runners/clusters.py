"""Test parameters for clusters, and the child processes of the tests."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# Ray has a separate environment. If the variable requires Ray, a missing environment fails the test.
KINDS = [
    pytest.param("dask", marks=pytest.mark.story),
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
    """Return the command lines of all running descendants of this process, by process id.

    Python's resource tracker is left out, because it stays once anything was spawned.
    """
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

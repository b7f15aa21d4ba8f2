"""Share helpers with the tests of the merge engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

MERGE_CORE = Path(__file__).resolve().parents[1] / "merge_core"
sys.path += [str(MERGE_CORE), str(MERGE_CORE / "experts")]


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "home"))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave memory for one part of a measurement, so that each part has a run of its own."""
    from mergegate.tasks.merge import calibration

    monkeypatch.setattr(calibration, "_SHARE", 0)
    monkeypatch.setattr(calibration, "_LEAST", 1)

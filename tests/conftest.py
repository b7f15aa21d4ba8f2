"""What every test shares: a Prefect of its own, no network, and a project state that ends with the test."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.local_api import configure, local_api

# Before anything imports Prefect or a Hugging Face library: they read the environment at import.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="mergegate-prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ.pop("PREFECT_API_URL", None)
os.environ["HF_HUB_OFFLINE"] = "1"
configure(Path(os.environ["PREFECT_HOME"]))

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[None]:
    """Prefect's API for tests that run stages or flows in this process."""
    with local_api():
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project state of its own."""
    place = tmp_path / "state"
    monkeypatch.setenv("MERGEGATE_HOME", str(place))
    return place

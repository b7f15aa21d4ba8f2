"""What every test shares: a Prefect of its own, no network, and a project state that ends with the test."""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from importlib.metadata import version
from pathlib import Path

# Before anything computes: kernels of microseconds, for which a second thread only waits (and takes a core from the
# other worker while it does).
os.environ.setdefault("OMP_NUM_THREADS", "1")

import certifi
import pytest
import typer.testing
from hypothesis import settings
from kept import kept

from mergegate.flows.prefect_api import configure, local_api
from mergegate.tasks.checkpoints.model_process import compile_libraries

# Before anything imports Prefect or a Hugging Face library: they read the environment at import.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="mergegate-prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ.pop("PREFECT_API_URL", None)
os.environ["HF_HUB_OFFLINE"] = "1"
configure(Path(os.environ["PREFECT_HOME"]))
# That Prefect is on the loopback, without TLS: each of its clients would read 140 certificates all the same.
_FIRST, _END, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
_ONE_CERTIFICATE = Path(os.environ["PREFECT_HOME"]) / "one.pem"
_ONE_CERTIFICATE.write_text(_FIRST + _END)
os.environ["PREFECT_API_SSL_CERT_FILE"] = str(_ONE_CERTIFICATE)

# A Typer app is made into forty commands whenever one of them is called: once is enough.
typer.testing._get_command = cache(typer.testing._get_command)

# No test judges speed: beside other work, an example that takes 4 ms may take 300.
settings.register_profile("mergegate", deadline=None)
settings.load_profile("mergegate")

PROJECT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        compile_libraries()  # In a fresh clone: by one, before each worker would compile the same at the same time.


# Libraries and thousands of tests are millions of objects that stay, and were an eighth of all time to look through.
gc.set_threshold(50_000, 20, 20)
_MANY_MODULES = 300
_frozen = 0  # modules that there were when what had been imported was last put out of the collector's sight


def pytest_collection_finish() -> None:
    _freeze()


def pytest_runtest_teardown() -> None:
    if len(sys.modules) > _frozen + _MANY_MODULES:
        gc.collect()
        _freeze()


def _freeze() -> None:
    global _frozen
    gc.freeze()
    _frozen = len(sys.modules)


@pytest.fixture(scope="session")
def prefect_database(request: pytest.FixtureRequest) -> Path:
    """Prefect's database with nothing in it: a hundred migrations that are carried out once, not in each process."""

    def make(place: Path) -> None:
        with local_api():
            pass
        place.mkdir()
        with (
            closing(sqlite3.connect(Path(os.environ["PREFECT_HOME"]) / "prefect.db")) as migrated,
            closing(sqlite3.connect(place / "prefect.db")) as copy,
        ):
            migrated.backup(copy)

    key = hashlib.sha256(version("prefect").encode()).hexdigest()
    return kept(request.config, "prefect", key, make) / "prefect.db"


@pytest.fixture(scope="session")
def begin_records(prefect_database: Path) -> Callable[[Path], None]:
    """Give a new project state that database, where another process would carry out those migrations again."""

    def begin(home: Path) -> None:
        (home / "prefect").mkdir(parents=True)
        shutil.copy(prefect_database, home / "prefect")

    return begin


@pytest.fixture(scope="session")
def prefect_api(prefect_database: Path) -> Iterator[None]:
    """Prefect's API for tests that run stages or flows in this process."""
    shutil.copy(prefect_database, os.environ["PREFECT_HOME"])
    with local_api():
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project state of its own."""
    place = tmp_path / "state"
    monkeypatch.setenv("MERGEGATE_HOME", str(place))
    return place

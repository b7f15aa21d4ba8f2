"""Fixtures for all tests: a separate Prefect server, no network access, and a project state per test."""

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
from typing import TYPE_CHECKING

# Set before anything computes. The test kernels run for microseconds, so a second thread would only wait and occupy a
# core that another test worker needs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import budget
import certifi
import pytest
import typer.testing
from hypothesis import settings
from kept import kept

from mergegate.flows.prefect_api import configure, local_api
from mergegate.merge_core.files import state_directory
from mergegate.tasks.models.checkpoints import model_process, project_access

if TYPE_CHECKING:
    from mergegate.tasks.quality.variants import VariantFormat

# Keep compiled modules, as the Makefile does. Otherwise each process would compile all modules and tests again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Set before Prefect or a Hugging Face library is imported, because they read the environment at import.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="mergegate-prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ.pop("PREFECT_API_URL", None)
os.environ["HF_HUB_OFFLINE"] = "1"
configure(Path(os.environ["PREFECT_HOME"]))
# The Prefect server is on loopback without TLS, but each client would still load 140 certificates. Give it one.
_FIRST, _END, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
_ONE_CERTIFICATE = Path(os.environ["PREFECT_HOME"]) / "one.pem"
_ONE_CERTIFICATE.write_text(_FIRST + _END)
os.environ["PREFECT_API_SSL_CERT_FILE"] = str(_ONE_CERTIFICATE)

# Typer rebuilds an app of forty commands for each invocation; build it once.
typer.testing._get_command = cache(typer.testing._get_command)

# Tests do not judge speed. On a busy machine, an example that takes 4 ms may take 300 ms.
# CI tests the same examples of each property every time, so that only a change can break it. Other runs draw new ones.
settings.register_profile("mergegate", deadline=None, derandomize="MERGEGATE_SAME_EXAMPLES" in os.environ)
settings.load_profile("mergegate")

PROJECT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        model_process.compile_libraries()  # in a fresh clone, once here rather than in every worker at the same time
    if "RECORD_DURATIONS" in os.environ:
        config.pluginmanager.register(budget.Meter())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(budget.Recorder())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[budget.COLLECTED] = budget.count(items)  # Before pytest deselects the tests of other tiers.
    # One worker begins with the modules that need Prefect's API, because each start of it takes ten seconds of CPU.
    need_api = {item.path for item in items if "prefect_api" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in need_api)


# Libraries and thousands of tests create millions of long-lived objects. Scanning them took an eighth of the total
# time.
gc.set_threshold(50_000, 20, 20)
_MANY_MODULES = 300
_frozen = 0  # Number of imported modules when the collector last froze the existing objects.


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


@pytest.fixture(autouse=True)
def long_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep messages of the command line on one line each, so that they match the expected text."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(scope="session", autouse=True)
def one_sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let all tests share a model process, which reads and writes their directories. Tests of confinement undo this."""
    base = tmp_path_factory.getbasetemp()
    project_access.expected_files.update(map(str, (base, PROJECT / "profiles", PROJECT / "tests")))
    with pytest.MonkeyPatch.context() as patch:
        for module in (project_access, model_process):
            patch.setattr(module, "sandbox_directory", lambda *names: state_directory(base.joinpath(*names)))
        yield


@pytest.fixture(scope="session")
def prefect_database(request: pytest.FixtureRequest) -> Path:
    """Return an empty, migrated Prefect database; the hundred migrations run once instead of in each process."""

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
    """Return a function that copies the migrated database into a new project state, to avoid another migration."""

    def begin(home: Path) -> None:
        (home / "prefect").mkdir(parents=True)
        shutil.copy(prefect_database, home / "prefect")

    return begin


@pytest.fixture(scope="session")
def prefect_api(prefect_database: Path) -> Iterator[None]:
    """Run Prefect's API for tests that execute stages or flows in this process."""
    shutil.copy(prefect_database, os.environ["PREFECT_HOME"])
    with local_api():
        yield


@pytest.fixture
def rounded_variants(tmp_path: Path) -> Iterator[type[VariantFormat]]:
    """Let profiles use the variant format ``rounded``, in this process and in its children."""
    if (folder := str(PROJECT / "tests" / "variants")) not in sys.path:
        sys.path.append(folder)
    from rounded_format import rounded_registered

    with rounded_registered(tmp_path / "site-of-rounded") as registered:
        yield registered


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test its own project state."""
    place = tmp_path / "state"
    monkeypatch.setenv("MERGEGATE_HOME", str(place))
    return place

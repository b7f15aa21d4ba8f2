"""Hostile input ends with its exit code: no traceback, no hang, and no output that looks finished."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from corpus import CHECKPOINTS, PROFILES, RECIPES, RELEASES, RESULTS, TASKS, exit_code, put
from honest import PROFILE, RECIPE, checkpoint, release, results, samples
from samples import sampled
from typer.testing import CliRunner

from mergegate.flows.cli.app import app

SECONDS, BYTES = 20, 1 << 30  # CPU seconds, so that other work on the machine does not count.
PATIENCE = 60  # Wall-clock seconds, for example for a pipe without a writer.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of the command, with two honest parents, a recipe and a profile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("base", "other"):
        checkpoint(tmp_path / name)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "profile.yaml").write_text(PROFILE)
    return tmp_path


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Path:
    """Return a release as mergegate publishes it."""
    return release(tmp_path_factory.mktemp("release"))


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes too much time or memory."""

    def too_long(signal_number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"over {PATIENCE} s")

    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak memory.
    before = kilobytes("VmRSS")
    old = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PATIENCE)
    started = time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert time.process_time() - started < SECONDS
    assert (kilobytes("VmHWM") - before) * 1024 < BYTES


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def mergegate(*arguments: str) -> tuple[int, str]:
    """Run a command and return its exit code and its output."""
    with bounded():
        result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # On the command line, this would be a traceback.
    assert "Traceback" not in result.output
    assert not {"\x1b", "\0"} & set(result.output)
    assert len(result.output) < 100_000
    return result.exit_code, result.output


def nothing_looks_finished(here: Path) -> None:
    assert not (here / "out").exists()
    assert not (here / "EXECUTED").exists()
    store = here / "state" / "store"
    # A stage stores a directory, or a JSON file if it has only a value.
    built = [path for path in store.glob("*/*") if path.is_dir() or path.suffix == ".json"]
    finished = [path for path in built if not path.name.endswith(".partial")]
    assert [path for path in finished if path.parent.name in ("merge", "report", "gate")] == []


def ends(here: Path, code: int, *arguments: str) -> None:
    found, output = mergegate(*arguments)
    assert found == code, output
    if code:
        assert output.strip(), "a no without a word"
        nothing_looks_finished(here)


def test_honest_inputs_pass(here: Path) -> None:
    ends(here, 0, "merge", "recipe.yaml", "out")
    for name in ("m", "r"):
        results(here / name, samples(400))
    ends(here, 0, "gate", "merge=m", "reference=r", "--profile", "profile.yaml")


def sample(cases: Collection[str], step: int) -> list[Any]:
    return sampled(cases, list(cases)[::step], pytest.mark.proof)


@pytest.mark.parametrize("name", sample(CHECKPOINTS, 3))
def test_a_hostile_checkpoint(here: Path, name: str) -> None:
    CHECKPOINTS[name](here / "other")
    ends(here, exit_code(name, 2), "merge", "recipe.yaml", "out")


@pytest.mark.parametrize("name", sample(RECIPES, 4))
def test_a_hostile_recipe(here: Path, name: str) -> None:
    put("hostile.yaml", RECIPES[name])(here)
    ends(here, 2, "merge", "hostile.yaml", "out")


@pytest.mark.parametrize("name", sample(PROFILES, 3))
def test_a_hostile_profile(here: Path, name: str) -> None:
    put("profile.yaml", PROFILES[name])(here)
    ends(here, 2, "check", "profile.yaml")


@pytest.mark.parametrize("name", sample(TASKS, 4))
def test_a_hostile_task(here: Path, name: str) -> None:
    TASKS[name](here)
    (here / "profile.yaml").write_text(PROFILE.replace("task: letters", "task: task.yaml"))
    ends(here, 2, "check", "profile.yaml")


@pytest.mark.parametrize("name", sample(RESULTS, 3))
def test_hostile_results(here: Path, name: str) -> None:
    results(here / "r")
    RESULTS[name](here / "m")
    ends(here, 2, "gate", "merge=m", "reference=r", "--profile", "profile.yaml")


@pytest.mark.parametrize("name", sample(RELEASES, 5))
def test_a_hostile_release(here: Path, released: Path, name: str) -> None:
    place = Path(shutil.copytree(released, here / "releases" / released.name))
    RELEASES[name](place)
    ends(here, exit_code(name, 3), "verify", str(place))

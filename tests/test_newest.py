"""The job that tries newer dependencies parses the output of pip and pytest into one line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def newest() -> Any:
    spec = importlib.util.spec_from_file_location("newest", ROOT / ".ci" / "newest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["newest"] = module
    spec.loader.exec_module(module)
    return module


def test_every_direct_dependency_is_tried_and_pinned(newest: Any) -> None:
    names = newest.direct_dependencies(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    assert {"prefect", "transformers", "lm-eval", "huggingface-hub", "safetensors"} <= set(names)
    assert "torch" not in names
    unpinned = [name for name in names if name not in newest.pins((ROOT / "constraints.txt").read_text())]
    assert not unpinned


def test_the_newest_version_is_the_one_in_brackets(newest: Any) -> None:
    said = "WARNING: odd\nprefect (3.9.1)\nAvailable versions: 3.9.1, 3.9.0, 3.8.8\n"
    assert newest.newest_version(said) == "3.9.1"
    assert newest.newest_version("ERROR: No matching distribution found for nothing\n") == ""


def test_a_conflict_names_what_is_in_the_way(newest: Any) -> None:
    said = (
        "ERROR: Cannot install prefect==3.9.1 because these package versions have conflicting dependencies.\n"
        "The conflict is caused by:\n    prefect 3.9.1 depends on certifi>=2026.10.19\n"
        "    The user requested (constraint) certifi==2026.10.18\n"
    )
    assert newest.conflict(said) == "prefect 3.9.1 depends on certifi>=2026.10.19"


def test_what_failed_is_counted(newest: Any) -> None:
    said = "....F\nFAILED tests/a.py::test_one - boom\nERROR tests/b.py - boom\n2 failed\n"
    assert newest.broken_tests(said) == "tests/a.py::test_one and 1 more"
    assert newest.broken_tests("collected 0 items\n") == "collected 0 items"


@pytest.mark.slow
def test_the_environment_has_what_the_other_has_and_may_have_it_newer(newest: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    library = other / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    library.mkdir(parents=True)
    (library / "ours.py").write_text("version = 1\n")
    (library / "theirs.py").write_text("version = 1\n")
    python = newest.environment_beside(tmp_path / "new", other)
    own = tmp_path / "new" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (own / "ours.py").write_text("version = 2\n")
    script = "import ours, theirs; print(ours.version, theirs.version)"
    said = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "2 1\n"

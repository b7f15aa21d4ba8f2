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
    module = sys.modules["newest"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_direct_dependency_is_pinned_and_each_limit_has_its_reason_in_the_docs(newest: Any) -> None:
    direct = newest.direct_dependencies(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    assert {"prefect", "transformers", "lm-eval", "huggingface-hub", "safetensors"} <= set(direct)
    assert direct["lm-eval"].extras == {"hf", "ifeval", "math"}
    assert direct.keys() <= newest.pins((ROOT / "constraints.txt").read_text()).keys()
    limited = {
        name for name, requirement in direct.items() for one in requirement.specifier if one.operator in {"<", "=="}
    }
    table = (ROOT / "dev/dependencies.md").read_text()
    assert sorted(name for name in limited if f"| `{name}` |" not in table) == []


CONFLICT = (
    "ERROR: Cannot install prefect==3.9.1 because these package versions have conflicting dependencies.\n"
    "The conflict is caused by:\n    prefect 3.9.1 depends on certifi>=2026.10.19\n"
    "    The user requested (constraint) certifi==2026.10.18\n"
)
UNMET = "prefect 3.9.1 requires fastapi<0.151,>=0.139.0, but you have fastapi 0.165.0 which is incompatible.\n"
INSTALLED = UNMET + "Successfully installed fastapi-0.165.0 starlette-1.11.0\n"
PINS = 'SQLAlchemy==2.0.58  # not ==2.1\n\t@.ci/install .venv-x "cyclonedx-python-lib[json-validation]==11.12.0" \\\n'
FAILED = "....F\nFAILED tests/a.py::test_one - boom\nERROR tests/b.py - boom\n2 failed\n"


@pytest.mark.parametrize(
    ("function", "arguments", "found"),
    [
        ("pins", (PINS,), {"sqlalchemy": "2.0.58", "cyclonedx-python-lib": "11.12.0"}),
        ("newest_version", ("WARNING: odd\nprefect (3.9.1)\nAvailable versions: 3.9.1, 3.9.0, 3.8.8\n",), "3.9.1"),
        ("newest_version", ("ERROR: No matching distribution found for nothing\n",), ""),
        ("conflict", (CONFLICT,), "prefect 3.9.1 depends on certifi>=2026.10.19"),
        ("broken_bounds", (INSTALLED,), ["prefect 3.9.1 requires fastapi<0.151,>=0.139.0"]),
        ("also_installed", (INSTALLED, "fastapi"), ["starlette-1.11.0"]),
        ("broken_tests", (FAILED,), "tests/a.py::test_one and 1 more"),
        ("broken_tests", ("collected 0 items\n",), "collected 0 items"),
    ],
)
def test_output_of_pip_and_pytest_is_parsed(newest: Any, function: str, arguments: tuple[str, ...], found: Any) -> None:
    assert getattr(newest, function)(*arguments) == found


def test_only_a_release_within_the_bounds_fails_the_job(newest: Any) -> None:
    def judged(bounds: str, outcome: str) -> tuple[str, int]:
        result = newest.within_bounds(newest.Result("x", "1", "2", outcome), newest.SpecifierSet(bounds))
        return result.outcome, newest.exit_code([result])

    assert judged(">=1", newest.WORKS) == (newest.WORKS, 0)
    assert judged(">=1", newest.BREAKS) == (newest.BREAKS, 1)
    assert judged("<2", newest.BREAKS) == (newest.STILL_EXCLUDED, 0)
    assert judged("<2", newest.WORKS) == (newest.BOUND_CAN_GO, 0)
    assert judged("<2", newest.EXCLUDED) == (newest.EXCLUDED, 0)
    assert judged("<2", newest.NOT_INSTALLED) == (newest.NOT_INSTALLED, 2)


@pytest.mark.proof
def test_the_environment_sees_another_and_prefers_its_own_packages(newest: Any, tmp_path: Path) -> None:
    packages = Path("lib", f"python3.{sys.version_info.minor}", "site-packages")
    library = tmp_path / "other" / packages
    library.mkdir(parents=True)
    (library / "ours.py").write_text("version = 1\n")
    (library / "theirs.py").write_text("version = 1\n")
    python = newest.environment_beside(tmp_path / "new", tmp_path / "other")
    (tmp_path / "new" / packages / "ours.py").write_text("version = 2\n")
    script = "import ours, theirs; print(ours.version, theirs.version)"
    assert subprocess.check_output([python, "-c", script], text=True) == "2 1\n"

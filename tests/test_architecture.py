"""The floors hold: imports only point down, and the ground floor stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
FLOORS = ("merge_core", "tasks", "flows")  # from the ground up


def imports_of(file: Path) -> set[str]:
    """Top-level packages that a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def modules() -> list[Path]:
    return [file for floor in FLOORS for file in sorted((PROJECT / floor).rglob("*.py"))]


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(PROJECT)))
def test_arrows_only_point_down(file: Path) -> None:
    floor = FLOORS.index(file.relative_to(PROJECT).parts[0])
    above = set(FLOORS[floor + 1 :])
    assert not imports_of(file) & above


@pytest.mark.parametrize("package", ["prefect", "transformers", "lm_eval"])
def test_the_ground_floor_knows_no(package: str) -> None:
    users = [file for file in sorted((PROJECT / "merge_core").rglob("*.py")) if package in imports_of(file)]
    assert users == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("merge_core", ("torch", "numba", "prefect", "transformers")),
        ("flows.cli", ("torch", "numba", "prefect", "transformers", "lm_eval", "matplotlib", "pydantic")),
    ],
)
def test_importing_stays_light(module: str, heavy: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert seen.stdout.strip() == "[]"

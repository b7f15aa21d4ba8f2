"""Import scripts of `benchmarks/` as modules, so that tests check the documented numbers with the same code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PLACE = Path(__file__).resolve().parents[1] / "benchmarks"


def load_benchmark(name: str) -> ModuleType:
    """Import `benchmarks/<name>.py` with its sibling scripts importable, as when it runs as a script."""
    if str(PLACE) not in sys.path:
        sys.path.append(str(PLACE))  # Appended last, so that a script never shadows an installed module.
    return importlib.import_module(name)


def script_fixture(name: str) -> Any:
    """Return a fixture ``script`` with the module of ``benchmarks/<name>.py``."""
    return pytest.fixture(scope="module", name="script")(lambda: load_benchmark(name))

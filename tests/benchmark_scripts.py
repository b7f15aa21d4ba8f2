"""Import scripts of `benchmarks/` as modules, so that tests check the documented numbers with the same code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

PLACE = Path(__file__).resolve().parents[1] / "benchmarks"


def load_benchmark(name: str) -> ModuleType:
    """Import `benchmarks/<name>.py` with its sibling scripts importable, as when it runs as a script."""
    if str(PLACE) not in sys.path:
        sys.path.append(str(PLACE))  # Appended last, so that a script never shadows an installed module.
    return importlib.import_module(name)

"""Scripts of ``benchmarks/`` as modules: what docs/ tells by them, a test tells by the same code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

PLACE = Path(__file__).resolve().parents[1] / "benchmarks"


def load_benchmark(name: str) -> ModuleType:
    """The script ``name.py``, which finds its neighbours as it does when it is run."""
    if str(PLACE) not in sys.path:
        sys.path.append(str(PLACE))  # last: no test is to find a script by chance
    return importlib.import_module(name)

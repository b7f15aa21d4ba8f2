"""Importing libraries without what they take along wherever it is installed, and is never asked anything here.

``requests`` looks for a second guesser of encodings, ``portalocker`` (of lm-eval's metrics) for a client of Redis,
``accelerate`` for one of AWS, transformers' models for SciPy, by which losses of object detectors are computed.
Together they are a quarter of what a process that holds models spends before its first answer.
"""

from __future__ import annotations

import importlib
import sys

_UNASKED = ("boto3", "chardet", "redis", "scipy")


def import_lean(*modules: str) -> None:
    """Import ``modules`` as if what nobody asks were not installed."""
    wanted = [module for module in modules if module not in sys.modules]
    unseen = [name for name in _UNASKED if wanted and name not in sys.modules]
    for name in unseen:
        sys.modules[name] = None  # type: ignore[assignment]  # "not to be found", for imports and find_spec alike
    try:
        for module in wanted:
            importlib.import_module(module)
    finally:
        for name in unseen:
            del sys.modules[name]

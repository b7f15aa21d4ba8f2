"""Importing libraries without what they take along wherever it is installed, and is never asked anything here.

``requests`` looks for a second guesser of encodings, ``portalocker`` (of lm-eval's metrics) for a client of Redis,
``accelerate`` for one of AWS, transformers' models for SciPy, by which losses of object detectors are computed.
Together they are a quarter of what a process that holds models spends before its first answer, and looking for cycles
among half a million objects that stay is an eighth.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_UNASKED = ("boto3", "chardet", "redis", "scipy")


def import_lean(*modules: str) -> None:
    """Import ``modules``, one after the other, as if what nobody asks were not installed.

    A package of which a part is imported has looked already, and may remember what it saw: from the rest of it nothing
    is hidden.
    """
    for module in modules:
        seen = module.partition(".")[0] in sys.modules
        with _hidden(() if seen else _UNASKED), _uncollected():
            importlib.import_module(module)


@contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    unseen = [name for name in names if name not in sys.modules]
    for name in unseen:
        sys.modules[name] = None  # type: ignore[assignment]  # "not to be found", for imports and find_spec alike
    try:
        yield
    finally:
        for name in unseen:
            del sys.modules[name]


@contextmanager
def _uncollected() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()

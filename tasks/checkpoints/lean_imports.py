"""Import libraries without the optional dependencies that mergegate never uses.

Several libraries import an optional package if it is installed. ``requests`` imports a second encoding detector,
``portalocker`` (used by lm-eval's metrics) a Redis client, ``accelerate`` an AWS client, and the models of
transformers SciPy, for the losses of object detectors. Together these imports take a quarter of the time that the
model process needs before its first answer. Another eighth goes into garbage collection over half a million objects
that are never freed, so collection is off during the imports.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_UNASKED = ("boto3", "chardet", "redis", "scipy")


def import_lean(*modules: str) -> None:
    """Import ``modules`` in order, as if the unused optional packages were not installed.

    If a part of a package is already imported, it may have probed for the optional packages and stored the result. In
    that case, the rest of the package can import them too.
    """
    for module in modules:
        is_imported = module.partition(".")[0] in sys.modules
        with _hide_packages(() if is_imported else _UNASKED), _pause_collection():
            importlib.import_module(module)


@contextmanager
def _hide_packages(names: tuple[str, ...]) -> Iterator[None]:
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        # With None, both the import statement and find_spec report the package as missing.
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _pause_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

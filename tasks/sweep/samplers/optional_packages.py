"""Import optional packages when they are needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from mergegate.merge_core.errors import InvalidInput


def installed(package: str, extra: str = "sweep") -> Any:
    """Import a package and return it.

    Raises:
        InvalidInput: The package is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise InvalidInput(
            "sweep",
            found=f"{error.name} is not installed",
            expected=f"the extra '{extra}'",
            remedy=f"pip install mergegate[{extra}]",
        ) from None


@contextmanager
def quiet_optuna(optuna: Any) -> Iterator[None]:
    """Suppress Optuna's log line for each trial and its warnings about experimental features."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)

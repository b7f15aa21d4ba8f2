"""Packages that are there only where they are wanted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from mergegate.merge_core.errors import InvalidInput


def installed(package: str, extra: str = "sweep") -> Any:
    """The package, imported now.

    Raises:
        InvalidInput: It is not installed.
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
    """Optuna tells every trial to standard error, and warns of what is experimental."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)

"""Packages that are there only where they are wanted."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from merge_core.errors import InvalidInput


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

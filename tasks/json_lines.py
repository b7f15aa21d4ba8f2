"""Files with one JSON object a line: one line of them, or an error that says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from merge_core.errors import InvalidInput


def place(path: Path, number: int) -> str:
    """What messages call line ``number`` (from 1) of ``path``."""
    return f"{path}: line {number}"


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The object in line ``number`` (from 1) of ``path``.

    Raises:
        InvalidInput: for a line that is no JSON object.
    """
    where = place(path, number)
    try:
        document = json.loads(line)
    except ValueError as error:
        raise InvalidInput(where, found=f"not JSON: {error}", expected="one JSON object a line") from None
    if not isinstance(document, dict):
        raise InvalidInput(where, found=type(document).__name__, expected="a JSON object")
    return document

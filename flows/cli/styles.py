"""How what every command shows looks on a terminal: outcomes in colour, paths as a person would type them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mergegate.tasks.stage import Outcome

OUTCOME_STYLES: Mapping[Outcome | None, str] = {"pass": "green", "inconclusive": "yellow", "fail": "bold red", None: ""}


def short_path(path: Path | str) -> str:
    """The path as a person in this directory would type it; an address, and what lies elsewhere, as it is."""
    if isinstance(path, str):
        return path
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        return str(path)
    return str(path) if relative.startswith("..") else relative

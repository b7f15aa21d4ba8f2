"""Define the common look of all commands: colors of outcomes, and short paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mergegate.tasks.stage import Outcome

OUTCOME_STYLES: Mapping[Outcome | None, str] = {"pass": "green", "inconclusive": "yellow", "fail": "bold red", None: ""}


def short_path(path: Path | str) -> str:
    """Return the path as a user in this directory would type it. A URL or a path elsewhere stays as it is."""
    if isinstance(path, str):
        return path
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory was deleted
        return str(path)
    return str(path) if relative.startswith("..") else relative

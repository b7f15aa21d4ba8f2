"""Read the environment of a project: its home directory, and the variables that configure it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput

RENAMED_VARIABLES: Mapping[str, str] = {
    "MERGEGATE_QUOTA": "MERGEGATE_STORE_QUOTA",
    "MERGEGATE_STORE": "MERGEGATE_SHARED_STORE",
    "MERGEGATE_SHARE_UP_TO": "MERGEGATE_SHARED_STORE_MAX_SIZE",
}
"""Former names of environment variables, with their present names."""


def home() -> Path:
    """Return the absolute path of ``$MERGEGATE_HOME``, by default ``.mergegate`` in the working directory.

    The directory may not exist.
    """
    return Path(os.environ.get("MERGEGATE_HOME", ".mergegate")).absolute()


def environment_setting(variable: str) -> str:
    """Return the value of an environment variable without surrounding blanks, or an empty string.

    Raises:
        InvalidInput: The variable is set under its former name.
    """
    for former, current in RENAMED_VARIABLES.items():
        if current == variable and former in os.environ:
            raise InvalidInput(former, found="an environment variable that was renamed", remedy=f"set {current}")
    return os.environ.get(variable, "").strip()


def nearest(path: Path) -> Path:
    """Return the directory ``path`` if it exists, or its closest parent that does."""
    absolute = path.absolute()
    return next(directory for directory in (absolute, *absolute.parents) if directory.is_dir())

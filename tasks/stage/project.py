"""Locate mergegate's home directory, and the existing directory closest to a path."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Return the absolute path of ``$MERGEGATE_HOME``, by default ``.mergegate`` in the working directory.

    The directory may not exist.
    """
    return Path(os.environ.get("MERGEGATE_HOME", ".mergegate")).absolute()


def nearest(path: Path) -> Path:
    """Return the directory ``path`` if it exists, or its closest parent that does."""
    absolute = path.absolute()
    return next(directory for directory in (absolute, *absolute.parents) if directory.is_dir())

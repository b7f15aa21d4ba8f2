"""Where a project keeps its own state, and on which disk a place that need not exist would be."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$MERGEGATE_HOME``, else ``.mergegate`` in the working directory. Always absolute; it need not exist."""
    return Path(os.environ.get("MERGEGATE_HOME", ".mergegate")).absolute()


def nearest(place: Path) -> Path:
    """The directory ``place``, or the one above it that exists."""
    absolute = place.absolute()
    return next(above for above in (absolute, *absolute.parents) if above.is_dir())

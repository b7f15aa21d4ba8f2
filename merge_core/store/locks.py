"""A lock on a file that its holder removes: whoever gets it must ask whether the file is still the one at that path."""

from __future__ import annotations

import os
from pathlib import Path


def is_linked(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that ``path`` names now, not one that was removed or replaced meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

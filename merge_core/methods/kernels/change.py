"""Kernel that adds a float32 change to stored numbers in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import TILE, narrow, widen


@compiled
def add_change(stored: Any, change: Any, round_change: bool) -> None:
    """Store ``stored + change``, rounded once.

    Args:
        stored: ``[n]``, changed in place.
        change: ``[n]``, float32.
        round_change: Whether to round the change to the stored format first.
    """
    tile, addend = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    rounded = np.empty(TILE, stored.dtype)
    for first in range(0, len(stored), TILE):
        m = min(TILE, len(stored) - first)
        sums, added = tile[:m], change[first : first + m]
        widen(stored, first, sums)
        if round_change:
            narrow(added, rounded, 0)
            added = addend[:m]
            widen(rounded, 0, added)
        for j in range(m):
            sums[j] += added[j]
        narrow(sums, stored, first)

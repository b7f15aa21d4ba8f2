"""Kernel for robust averages of each element. Counterpart of :mod:`merge_core.methods.robust`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import TILE, narrow, widen


@compiled
def trimmed_middle(data: Any, rows: Any, length: int, skipped: int, scale: Any, out: Any) -> None:
    """Write the base plus ``scale`` times the mean of the task vectors without the ``skipped`` lowest and highest."""
    count = len(rows) - 1
    base, deltas = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32)
    kept_count = np.float32(count - 2 * skipped)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        for i in range(count):
            delta = deltas[i]
            widen(data, rows[i + 1] + first, delta[:m])
            for j in range(m):
                delta[j] -= base[j]
        # Bubble sort, by swapping neighboring tiles, until the outer ones are in place. Even if none is left out, the
        # order is that of the values: sums run from low to high.
        for end in range(count - 1, 0, -1):
            for i in range(end):
                low, high = deltas[i], deltas[i + 1]
                for j in range(m):
                    a, b = low[j], high[j]
                    low[j], high[j] = min(a, b), max(a, b)
        total = deltas[skipped]
        for i in range(skipped + 1, count - skipped):
            value = deltas[i]
            for j in range(m):
                total[j] += value[j]
        for j in range(m):
            total[j] = base[j] + total[j] / kept_count * scale
        narrow(total[:m], out, first)

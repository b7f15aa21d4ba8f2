"""Kernel for elements that several models need. Counterpart of :mod:`merge_core.methods.agreement`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import TILE, narrow, widen


@compiled
def consensus(
    data: Any, rows: Any, length: int, weights: Any, thresholds: Any, agreement: int, scale: Any, out: Any
) -> None:
    """Add ``scale`` times the sum of weighted task vectors to the base, where at least ``agreement`` models need it."""
    count = len(rows) - 1
    base, total, needed = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.int32)
    weighted = np.empty((count, TILE), np.float32)
    zero = np.float32(0.0)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        for i in range(count):
            vector, weight = weighted[i], weights[i]
            widen(data, rows[i + 1] + first, vector[:m])
            for j in range(m):
                vector[j] = (vector[j] - base[j]) * weight
            for j in range(m):
                total[j] = vector[j] if i == 0 else total[j] + vector[j]
        needed[:m] = 0
        for i in range(count):
            vector, threshold = weighted[i], thresholds[i]
            for j in range(m):
                needed[j] += 1 if abs(vector[j]) > abs(total[j] - vector[j]) * threshold else 0
        for j in range(m):
            total[j] = base[j] + (total[j] if needed[j] >= agreement else zero) * scale
        narrow(total[:m], out, first)

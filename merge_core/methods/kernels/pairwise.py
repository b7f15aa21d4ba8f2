"""One model and its base. Counterparts of :mod:`merge_core.methods.pairwise`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import TILE, narrow, widen


@compiled
def nearswap(data: Any, rows: Any, length: int, t: Any, nearest: Any, out: Any) -> None:
    """``w = clip(t / max(|b - x|, nearest), 0, 1)``, ``w x + (1 - w) b``."""
    base, other = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        widen(data, rows[1] + first, other[:m])
        for j in range(m):
            away = abs(base[j] - other[j])
            share = one / (away if away > nearest else nearest) * t
            share = min(max(share, zero), one)
            other[j] = share * other[j] + (one - share) * base[j]
        narrow(other[:m], out, first)


@compiled
def importances(data: Any, rows: Any, length: int, grain: int, divergence: Any) -> Any:
    """``|x - b|`` times the divergence of the element's row: ``[1, elements]``.

    Args:
        divergence: ``[rows]`` float32 of this block's rows.
    """
    base, result = np.empty(TILE, np.float32), np.empty((1, length), np.float32)
    for row in range(len(divergence)):
        for first in range(row * grain, (row + 1) * grain, TILE):
            m = min(TILE, (row + 1) * grain - first)
            part = result[0, first : first + m]
            widen(data, rows[0] + first, base[:m])
            widen(data, rows[1] + first, part)
            for j in range(m):
                part[j] = abs(part[j] - base[j]) * divergence[row]
    return result


@compiled
def fuse(data: Any, rows: Any, length: int, grain: int, divergence: Any, bound: Any, out: Any) -> None:
    """The model's elements where their importance reaches ``bound``, else the base's."""
    base, other = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for row in range(len(divergence)):
        for first in range(row * grain, (row + 1) * grain, TILE):
            m = min(TILE, (row + 1) * grain - first)
            widen(data, rows[0] + first, base[:m])
            widen(data, rows[1] + first, other[:m])
            for j in range(m):
                other[j] = other[j] if abs(other[j] - base[j]) * divergence[row] >= bound else base[j]
            narrow(other[:m], out, first)

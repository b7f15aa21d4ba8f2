"""Kernels for one model and its base. Counterparts of :mod:`merge_core.methods.pairwise`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import TILE, narrow, widen


@compiled
def nearswap(data: Any, rows: Any, length: int, t: Any, nearest: Any, out: Any) -> None:
    """Write ``w x + (1 - w) b`` with ``w = clip(t / max(|b - x|, nearest), 0, 1)``."""
    base, model = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        widen(data, rows[1] + first, model[:m])
        for j in range(m):
            distance = abs(base[j] - model[j])
            share = one / (distance if distance > nearest else nearest) * t
            share = min(max(share, zero), one)
            model[j] = share * model[j] + (one - share) * base[j]
        narrow(model[:m], out, first)


@compiled
def importances(data: Any, rows: Any, length: int, grain: int, divergence: Any) -> Any:
    """Return ``|x - b|`` times the divergence of the element's row: ``[1, elements]``.

    Args:
        data: Stored numbers.
        rows: Start of the base and of the model in ``data``.
        length: Elements per row.
        grain: Elements per grain.
        divergence: ``[rows]`` float32, for the rows of this block.
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
    """Write the model's elements whose importance reaches ``bound``, and the base's elements elsewhere."""
    base, model = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for row in range(len(divergence)):
        for first in range(row * grain, (row + 1) * grain, TILE):
            m = min(TILE, (row + 1) * grain - first)
            widen(data, rows[0] + first, base[:m])
            widen(data, rows[1] + first, model[:m])
            for j in range(m):
                model[j] = model[j] if abs(model[j] - base[j]) * divergence[row] >= bound else base[j]
            narrow(model[:m], out, first)

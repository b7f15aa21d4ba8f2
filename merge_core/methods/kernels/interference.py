"""Kernels that find opposing task vectors. Counterpart of :func:`merge_core.analysis.interference.tally_grains`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import LANES, TILE, add_products, lane_elements, lanes_sum, widen


@compiled
def squares(data: Any, first_row: int, length: int, grain: int) -> Any:
    """Return the sum of squares of each grain: ``[grains]``. The input starts at ``data[first_row]``."""
    grains = (length + grain - 1) // grain
    result = np.empty(grains, np.float64)
    lanes = np.empty(LANES, np.float64)
    tile, wide = np.empty(TILE, np.float32), np.empty(TILE, np.float64)
    for g in range(grains):
        lanes[:] = 0.0
        for first in range(g * grain, min(length, (g + 1) * grain), TILE):
            m = min(TILE, min(length, (g + 1) * grain) - first)
            widen(data, first_row + first, tile[:m])
            for j in range(m):
                wide[j] = tile[j]
            for j in range(m, lane_elements(m)):
                wide[j] = 0.0
            add_products(wide, wide, lane_elements(m), lanes)
        result[g] = lanes_sum(lanes)
    return result


@compiled
def oppositions(data: Any, rows: Any, length: int, grain: int, limits: Any) -> Any:
    """Count the weights that task vectors move noticeably, and those that they move in opposite directions.

    ``limits`` ``[grains, vectors]`` are the sizes above which a change is noticeable. Return int64 ``[1 + pairs, 2]``.
    The first row has the number of weights that several vectors move, and how many of them move in opposite directions.
    The other rows have the same numbers for each pair of vectors.
    """
    count = limits.shape[1]
    counts = np.zeros((1 + count * (count - 1) // 2, 2), np.int64)
    base, vector = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    signs = np.empty((count, TILE), np.int8)
    ups, downs = np.empty(TILE, np.int8), np.empty(TILE, np.int8)
    for g in range((length + grain - 1) // grain):
        for first in range(g * grain, min(length, (g + 1) * grain), TILE):
            m = min(TILE, min(length, (g + 1) * grain) - first)
            widen(data, rows[0] + first, base[:m])
            ups[:m] = 0
            downs[:m] = 0
            for i in range(count):
                limit = limits[g, i]
                widen(data, rows[i + 1] + first, vector[:m])
                for j in range(m):
                    delta = vector[j] - base[j]
                    up, down = np.int8(delta > limit), np.int8(delta < -limit)
                    signs[i, j] = up - down
                    ups[j] += up
                    downs[j] += down
            moved, opposed = 0, 0
            for j in range(m):
                moved += ups[j] + downs[j] >= 2
                opposed += (ups[j] > 0) & (downs[j] > 0)
            counts[0, 0] += moved
            counts[0, 1] += opposed
            pair = 1
            for i in range(count):
                for k in range(i + 1, count):
                    both, opposed_pair = 0, 0
                    for j in range(m):
                        product = signs[i, j] * signs[k, j]
                        both += product != 0
                        opposed_pair += product < 0
                    counts[pair, 0] += both
                    counts[pair, 1] += opposed_pair
                    pair += 1
    return counts

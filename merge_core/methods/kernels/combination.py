"""Kernels for linear combinations and Gram matrices. Counterparts of :mod:`merge_core.methods.combination`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import (
    LANES,
    TILE,
    add_products,
    lane_elements,
    lanes_sum,
    narrow,
    widen,
)


@compiled
def combine(data: Any, rows: Any, length: int, coefficients: Any, about_base: bool, out: Any) -> None:
    """Write ``sum c_i x_i``, or ``b + sum c_i (x_i - b)``. Counterpart of :func:`.combination.combine`."""
    base, vector, total = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    shift = 1 if about_base else 0
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        if about_base:
            widen(data, rows[0] + first, base[:m])
        for i in range(len(coefficients)):
            widen(data, rows[i + shift] + first, vector[:m])
            c = coefficients[i]
            if about_base:
                for j in range(m):
                    vector[j] -= base[j]
            if i == 0:
                for j in range(m):
                    total[j] = vector[j] * c
            else:
                for j in range(m):
                    total[j] += vector[j] * c
        if about_base:
            for j in range(m):
                total[j] += base[j]
        narrow(total[:m], out, first)


@compiled
def gram(data: Any, rows: Any, length: int, grain: int, about_base: bool) -> Any:
    """Return the inner products of each pair of inputs ``i <= j``, summed over each grain: ``[grains, pairs]``."""
    shift = 1 if about_base else 0
    count = len(rows) - shift
    grains = (length + grain - 1) // grain
    lanes = np.empty((count * (count + 1) // 2, LANES), np.float64)
    result = np.empty((grains, len(lanes)), np.float64)
    base, vector = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    vectors = np.empty((count, TILE), np.float64)
    for g in range(grains):
        lanes[:] = 0.0
        for first in range(g * grain, min(length, (g + 1) * grain), TILE):
            m = min(TILE, min(length, (g + 1) * grain) - first)
            if about_base:
                widen(data, rows[0] + first, base[:m])
            for i in range(count):
                widen(data, rows[i + shift] + first, vector[:m])
                if about_base:
                    for j in range(m):
                        vector[j] -= base[j]
                for j in range(m):
                    vectors[i, j] = vector[j]
                for j in range(m, lane_elements(m)):
                    vectors[i, j] = 0.0
            pair = 0
            for i in range(count):
                for k in range(i, count):
                    add_products(vectors[i], vectors[k], lane_elements(m), lanes[pair])
                    pair += 1
        for pair in range(len(lanes)):
            result[g, pair] = lanes_sum(lanes[pair])
    return result

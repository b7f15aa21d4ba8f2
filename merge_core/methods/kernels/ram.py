"""Kernels for RAM: count which models changed an element, and merge. Counterparts of :mod:`merge_core.methods.ram`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled, inner
from mergegate.merge_core.methods.kernels.tiles import TILE, narrow, widen


@compiled
def count_changes(data: Any, rows: Any, length: int, epsilon: Any) -> Any:
    """Count the elements that each model changed, together with others and alone: ``[2, models]``."""
    count = len(rows) - 1
    base, deltas, number = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32), np.empty(TILE, np.int32)
    result = np.zeros((2, count), np.int64)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        _deltas(data, rows, first, m, epsilon, base, deltas, number)
        for i in range(count):
            delta, shared, unique = deltas[i], np.uint32(0), np.uint32(0)
            for j in range(m):
                is_changed = abs(delta[j]) > epsilon
                shared += np.uint32(is_changed & (number[j] > 1))
                unique += np.uint32(is_changed & (number[j] == 1))
            result[0, i] += shared
            result[1, i] += unique
    return result


@compiled
def ram(data: Any, rows: Any, length: int, epsilon: Any, factors: Any, out: Any) -> None:
    """Write ``b + sum D_i [changed_i] (factor_i if only one model changed it else 1 / number)``."""
    count = len(rows) - 1
    base, deltas, number = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32), np.empty(TILE, np.int32)
    share, total = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        _deltas(data, rows, first, m, epsilon, base, deltas, number)
        for j in range(m):
            share[j] = one / np.float32(max(number[j], 1))
        total[:m] = zero
        for i in range(count):
            delta, factor = deltas[i], factors[i]
            for j in range(m):
                value = delta[j] * (factor if number[j] == 1 else share[j])
                total[j] += value if abs(delta[j]) > epsilon else zero
        for j in range(m):
            total[j] += base[j]
        narrow(total[:m], out, first)


@inner
def _deltas(data: Any, rows: Any, first: int, m: int, epsilon: Any, base: Any, deltas: Any, number: Any) -> None:
    widen(data, rows[0] + first, base[:m])
    number[:m] = 0
    for i in range(len(deltas)):
        delta = deltas[i]
        widen(data, rows[i + 1] + first, delta[:m])
        for j in range(m):
            delta[j] -= base[j]
        for j in range(m):
            number[j] += np.int32(abs(delta[j]) > epsilon)

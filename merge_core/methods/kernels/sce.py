"""Kernels for SCE: variances over the models, energies, and the vote. Counterparts of :mod:`merge_core.methods.sce`.

The arguments ``cut``, which is ``(key, quota, tied, stride)``, and ``before`` are from a
:class:`merge_core.methods.selection.SelectionThreshold`. A key of -1 selects everything.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled, inner
from mergegate.merge_core.methods.kernels.sparsify import begin_numbering, keep_tied
from mergegate.merge_core.methods.kernels.tiles import (
    LANES,
    TILE,
    add_products,
    add_rows,
    lane_elements,
    lanes_sum,
    magnitude_bits,
    narrow,
    widen,
)


@compiled
def variances(data: Any, rows: Any, length: int) -> Any:
    """Return the population variance of the task vectors at each position: ``[1, elements]``."""
    count = len(rows) - 1
    base, deltas = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32)
    mean, result = np.empty(TILE, np.float32), np.empty((1, length), np.float32)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        _deltas(data, rows, first, m, base, deltas)
        _variance(deltas, m, mean, result[0, first : first + m])
    return result


@compiled
def energies(data: Any, rows: Any, length: int, start: int, grain: int, cut: Any, before: Any) -> Any:
    """Return the sum of squares of each task vector's selected elements in each grain: ``[grains, models]``."""
    count = len(rows) - 1
    base, deltas = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32)
    mean, variance = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    squared, lanes = np.empty(TILE, np.float64), np.empty((count, LANES), np.float64)
    result, tie_number = np.empty(((length + grain - 1) // grain, count), np.float64), np.empty(1, np.int64)
    tie_number[0] = 0
    for g in range(len(result)):
        lanes[:] = 0.0
        for first in range(g * grain, min(length, (g + 1) * grain), TILE):
            m = min(TILE, min(length, (g + 1) * grain) - first)
            _deltas(data, rows, first, m, base, deltas)
            if first == g * grain:
                begin_numbering(tie_number, cut, before, start // grain + g)
            _select(deltas, m, mean, variance, cut, tie_number)
            for i in range(count):
                delta = deltas[i]
                for j in range(m):
                    squared[j] = delta[j]
                for j in range(m, lane_elements(m)):
                    squared[j] = 0.0
                add_products(squared, squared, lane_elements(m), lanes[i])
        for i in range(count):
            result[g, i] = lanes_sum(lanes[i])
    return result


@compiled
def sce(
    data: Any, rows: Any, length: int, start: int, grain: int, cut: Any, before: Any, weights: Any, least: Any, out: Any
) -> None:
    """Write ``b + sum c_i D_i E_i / max(sum c_i E_i, least)`` for the selected elements, and ``b`` for the others."""
    count = len(rows) - 1
    base, deltas = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32)
    mean, variance = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    votes, merged, divisor = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    tie_number, zero = np.empty(1, np.int64), np.float32(0.0)
    tie_number[0] = 0
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        _deltas(data, rows, first, m, base, deltas)
        if first % grain == 0:
            begin_numbering(tie_number, cut, before, (start + first) // grain)
        _select(deltas, m, mean, variance, cut, tie_number)
        add_rows(deltas, m, votes)
        merged[:m] = zero
        divisor[:m] = zero
        for i in range(count):
            delta, weight = deltas[i], weights[i]
            for j in range(m):
                agrees = delta[j] > zero if votes[j] >= zero else delta[j] < zero
                merged[j] += delta[j] * weight if agrees else zero
                divisor[j] += weight if agrees else zero
        for j in range(m):
            merged[j] = base[j] + merged[j] / (divisor[j] if divisor[j] > least else least)
        narrow(merged[:m], out, first)


@inner
def _deltas(data: Any, rows: Any, first: int, m: int, base: Any, deltas: Any) -> None:
    widen(data, rows[0] + first, base[:m])
    for i in range(len(deltas)):
        delta = deltas[i]
        widen(data, rows[i + 1] + first, delta[:m])
        for j in range(m):
            delta[j] -= base[j]


@inner
def _variance(deltas: Any, m: int, mean: Any, variance: Any) -> None:
    count = np.float32(len(deltas))
    add_rows(deltas, m, mean)
    for j in range(m):
        mean[j] /= count
    for i in range(len(deltas)):
        delta = deltas[i]
        for j in range(m):
            deviation = delta[j] - mean[j]
            variance[j] = deviation * deviation if i == 0 else variance[j] + deviation * deviation
    for j in range(m):
        variance[j] /= count


@inner
def _select(deltas: Any, m: int, mean: Any, variance: Any, cut: Any, tie_number: Any) -> None:
    """Set task vectors to zero at positions whose variance is not among the largest."""
    if cut[0] < 0:
        return
    _variance(deltas, m, mean, variance[:m])
    key, zero = np.uint32(cut[0]), np.float32(0.0)
    if cut[1] < cut[2]:  # Only some ties are selected: those that the stride maps below the quota.
        keep_tied(variance, m, cut, 0, cut[1], tie_number)
    for i in range(len(deltas)):
        delta = deltas[i]
        for j in range(m):
            delta[j] = delta[j] if magnitude_bits(variance[j]) >= key else zero

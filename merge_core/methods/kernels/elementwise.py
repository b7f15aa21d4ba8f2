"""Kernels for linear combinations, Gram matrices and methods that merge element by element.

They are counterparts of :mod:`merge_core.methods.combination` and :mod:`merge_core.methods.elementwise`, except that
:func:`oppositions` is a counterpart of :func:`merge_core.analysis.interference.tally_grains`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.tiles import (
    LANES,
    TILE,
    add_products,
    compiled,
    inner,
    lane_elements,
    lanes_sum,
    narrow,
    read_deltas,
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


@compiled
def trimmed_middle(data: Any, rows: Any, length: int, trim_count: int, scale: Any, out: Any) -> None:
    """Write the base plus ``scale`` times the mean of all values but the ``trim_count`` lowest and highest."""
    count = len(rows) - 1
    base, deltas = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32)
    kept_count = np.float32(count - 2 * trim_count)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        read_deltas(data, rows, first, m, base, deltas)
        # Bubble sort until the values to leave out are at both ends. If none is left out, sort all of them, because the
        # reference also adds from low to high.
        for end in range(count - 1, 0, -1):
            for i in range(end):
                low, high = deltas[i], deltas[i + 1]
                for j in range(m):
                    a, b = low[j], high[j]
                    low[j], high[j] = min(a, b), max(a, b)
        total = deltas[trim_count]
        for i in range(trim_count + 1, count - trim_count):
            value = deltas[i]
            for j in range(m):
                total[j] += value[j]
        for j in range(m):
            total[j] = base[j] + total[j] / kept_count * scale
        narrow(total[:m], out, first)


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
    """Return ``|x - b|`` times the divergence of the row: ``[1, elements]``. ``divergence`` is float32 ``[rows]``."""
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
    """Write the model's element if its importance is at least ``bound``, else the base's element."""
    base, model = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for row in range(len(divergence)):
        for first in range(row * grain, (row + 1) * grain, TILE):
            m = min(TILE, (row + 1) * grain - first)
            widen(data, rows[0] + first, base[:m])
            widen(data, rows[1] + first, model[:m])
            for j in range(m):
                model[j] = model[j] if abs(model[j] - base[j]) * divergence[row] >= bound else base[j]
            narrow(model[:m], out, first)


@compiled
def count_changes(data: Any, rows: Any, length: int, epsilon: Any) -> Any:
    """Count, for each model, the elements that other models changed too and those that only it changed.

    Return both counts: ``[2, models]``.
    """
    count = len(rows) - 1
    base, deltas, number = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32), np.empty(TILE, np.int32)
    result = np.zeros((2, count), np.int64)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        _count_changed(data, rows, first, m, epsilon, base, deltas, number)
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
    """Write ``b + sum d_i [changed_i] (factor_i if c == 1 else 1 / c)``, if ``c`` models changed the element."""
    count = len(rows) - 1
    base, deltas, number = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32), np.empty(TILE, np.int32)
    share, total = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        _count_changed(data, rows, first, m, epsilon, base, deltas, number)
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
def _count_changed(data: Any, rows: Any, first: int, m: int, epsilon: Any, base: Any, deltas: Any, number: Any) -> None:
    """Read the task vectors, and count how many of them changed each element."""
    read_deltas(data, rows, first, m, base, deltas)
    number[:m] = 0
    for i in range(len(deltas)):
        delta = deltas[i]
        for j in range(m):
            number[j] += np.int32(abs(delta[j]) > epsilon)


@compiled
def add_change(stored_values: Any, change: Any, round_change: bool) -> None:
    """Add the float32 ``change`` to ``stored_values`` in place, and round the sum once.

    With ``round_change``, the change is first rounded to the stored format.
    """
    tile, addend = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    rounded = np.empty(TILE, stored_values.dtype)
    for first in range(0, len(stored_values), TILE):
        m = min(TILE, len(stored_values) - first)
        sums, added = tile[:m], change[first : first + m]
        widen(stored_values, first, sums)
        if round_change:
            narrow(added, rounded, 0)
            added = addend[:m]
            widen(rounded, 0, added)
        for j in range(m):
            sums[j] += added[j]
        narrow(sums, stored_values, first)


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

"""Fused CPU kernels: the computations of the methods on stored numbers, one short tile at a time, without temporaries.

Each kernel is the twin of a torch expression in its method's file, which is the readable reference; a test holds the
two together. They release the GIL and run on one thread: the engine runs several blocks at once. A tile fits the
first-level cache, its loops are simple enough for the compiler to vectorise, and no sum depends on vector width: long
sums have explicit lanes. Compiled once per machine and kept in numba's cache.

Stored numbers are uint16 (bit patterns of bfloat16) or float32; arithmetic is float32, long sums are float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from merge_core.merge_methods.masks import MULTIPLIER, ROUNDS, WEYL

# Elements per tile; divides the grain, so that a tile never crosses one.
TILE = 1024
# Partial sums that a long sum is split into, so that it can be vectorised in one defined order; divides the tile.
LANES = 256

_SIZE = np.uint32(0x7FFFFFFF)
_WORD = np.uint64(0xFFFFFFFF)
_compiled = njit(nogil=True, cache=True, error_model="numpy")


def _widen(data: Any, first: int, tile: Any) -> None:
    """Stored numbers from ``data[first]`` → float32 ``tile``."""
    raise NotImplementedError


@overload(_widen)
def _widen_for(data: Any, first: Any, tile: Any) -> Any:
    if data.dtype == types.uint16:

        def bfloat16(data: Any, first: Any, tile: Any) -> Any:
            patterns, stored = tile.view(np.uint32), data[first : first + len(tile)]
            for j in range(len(tile)):
                patterns[j] = np.uint32(stored[j]) << np.uint32(16)

        return bfloat16

    def float32(data: Any, first: Any, tile: Any) -> Any:
        stored = data[first : first + len(tile)]
        for j in range(len(tile)):
            tile[j] = stored[j]

    return float32


def _narrow(tile: Any, out: Any, first: int) -> None:
    """Float32 ``tile`` → stored numbers from ``out[first]``, rounded to nearest even."""
    raise NotImplementedError


@overload(_narrow)
def _narrow_for(tile: Any, out: Any, first: Any) -> Any:
    if out.dtype == types.uint16:

        def bfloat16(tile: Any, out: Any, first: Any) -> Any:
            patterns, stored = tile.view(np.uint32), out[first : first + len(tile)]
            for j in range(len(tile)):
                pattern = patterns[j]
                rounded = (pattern + np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                not_a_number = (pattern & _SIZE) > np.uint32(0x7F800000)
                stored[j] = np.uint16(0x7FC0) if not_a_number else np.uint16(rounded)

        return bfloat16

    def float32(tile: Any, out: Any, first: Any) -> Any:
        stored = out[first : first + len(tile)]
        for j in range(len(tile)):
            stored[j] = tile[j]

    return float32


@_compiled
def combine(data: Any, rows: Any, length: int, coefficients: Any, about_base: bool, out: Any) -> None:
    """``sum c_i x_i``, or ``b + sum c_i (x_i - b)``. Twin of :func:`.combination.combine`."""
    base, vector, total = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    shift = 1 if about_base else 0
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        if about_base:
            _widen(data, rows[0] + first, base[:m])
        for i in range(len(coefficients)):
            _widen(data, rows[i + shift] + first, vector[:m])
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
        _narrow(total[:m], out, first)


@_compiled
def gram(data: Any, rows: Any, length: int, grain: int, about_base: bool) -> Any:
    """Products of pairs ``i <= j`` summed over each grain: ``[grains, pairs]``. Twin of :func:`.combination.gram`."""
    shift = 1 if about_base else 0
    count = len(rows) - shift
    grains = (length + grain - 1) // grain
    lanes = np.zeros((count * (count + 1) // 2, LANES), np.float64)
    result = np.zeros((grains, len(lanes)), np.float64)
    base, vector = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    vectors = np.zeros((count, TILE), np.float64)
    for g in range(grains):
        lanes[:] = 0.0
        for first in range(g * grain, min(length, (g + 1) * grain), TILE):
            m = min(TILE, min(length, (g + 1) * grain) - first)
            if about_base:
                _widen(data, rows[0] + first, base[:m])
            for i in range(count):
                _widen(data, rows[i + shift] + first, vector[:m])
                if about_base:
                    for j in range(m):
                        vector[j] -= base[j]
                for j in range(m):
                    vectors[i, j] = vector[j]
                for j in range(m, _whole(m)):
                    vectors[i, j] = 0.0
            pair = 0
            for i in range(count):
                for k in range(i, count):
                    _add_products(vectors[i], vectors[k], _whole(m), lanes[pair])
                    pair += 1
        for pair in range(len(lanes)):
            result[g, pair] = _lanes_sum(lanes[pair])
    return result


@_compiled
def first_digits(data: Any, rows: Any, length: int) -> Any:
    """Counts of the leading 16 bits of ``|x_i - b|``: ``[models, 65536]``. Twin of the first pass of ``select``."""
    count = len(rows) - 1
    base, delta = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    patterns = delta.view(np.uint32)
    # Two tables in turns: equal neighbours would wait for each other's store.
    even, odd = np.zeros((count, 65536), np.uint32), np.zeros((count, 65536), np.uint32)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        _widen(data, rows[0] + first, base[:m])
        for i in range(count):
            _widen(data, rows[i + 1] + first, delta[:m])
            for j in range(m):
                delta[j] -= base[j]
            for j in range(m):
                patterns[j] = (patterns[j] & _SIZE) >> np.uint32(15)
            for j in range(0, m - 1, 2):
                even[i, patterns[j]] += np.uint32(1)
                odd[i, patterns[j + 1]] += np.uint32(1)
            if m % 2:
                even[i, patterns[m - 1]] += np.uint32(1)
    even += odd
    return even


@_compiled
def next_digits(data: Any, rows: Any, length: int, streams: Any, prefixes: Any, shift: int, width: int) -> Any:
    """Counts of the next bits of scores with the wanted prefix: ``[requests, 2**width]``."""
    base, delta = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    patterns = delta.view(np.uint32)
    counted = np.zeros((len(streams), 1 << width), np.uint32)
    mask = np.uint32((1 << width) - 1)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        _widen(data, rows[0] + first, base[:m])
        for r in range(len(streams)):
            _widen(data, rows[streams[r] + 1] + first, delta[:m])
            prefix = np.uint32(prefixes[r])
            for j in range(m):
                delta[j] -= base[j]
            for j in range(m):
                pattern = patterns[j] & _SIZE
                if pattern >> np.uint32(shift + width) == prefix:
                    counted[r, (pattern >> np.uint32(shift)) & mask] += np.uint32(1)
    return counted


@_compiled
def ties(data: Any, rows: Any, length: int, grain: int, streams: Any, keys: Any) -> Any:
    """Number of scores equal to the wanted key in each grain: ``[grains, requests]``."""
    base, delta = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    patterns = delta.view(np.uint32)
    counted = np.zeros(((length + grain - 1) // grain, len(streams)), np.int64)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        _widen(data, rows[0] + first, base[:m])
        for r in range(len(streams)):
            _widen(data, rows[streams[r] + 1] + first, delta[:m])
            key = np.uint32(keys[r])
            for j in range(m):
                delta[j] -= base[j]
            equal = np.uint32(0)
            for j in range(m):
                equal += np.uint32((patterns[j] & _SIZE) == key)
            counted[first // grain, r] += equal
    return counted


@_compiled
def kept_norms(
    data: Any,
    rows: Any,
    length: int,
    start: int,
    grain: int,
    tile: int,
    kinds: Any,
    cuts: Any,
    before: Any,
    chances: Any,
    spans: Any,
    scales: Any,
) -> Any:
    """``sum|d|`` and ``sum|kept d|`` per grain: ``[grains, 2, models]``."""
    count = len(rows) - 1
    base, delta = np.empty(tile, np.float32), np.zeros(_whole(tile), np.float32)
    random = np.empty(tile + 2, np.uint32)
    places, sorting = np.zeros((count, 2), np.int64), np.empty((3, tile), np.uint32)
    lanes = np.zeros((2, count, LANES), np.float64)
    grains = (length + grain - 1) // grain
    result = np.zeros((grains, 2, count), np.float64)
    for g in range(grains):
        lanes[:] = 0.0
        for first in range(g * grain, min(length, (g + 1) * grain), tile):
            m = min(tile, min(length, (g + 1) * grain) - first)
            _widen(data, rows[0] + first, base[:m])
            for i in range(count):
                _widen(data, rows[i + 1] + first, delta[:m])
                for j in range(m):
                    delta[j] -= base[j]
                for j in range(m, _whole(m)):
                    delta[j] = np.float32(0.0)
                _add_sizes(delta, _whole(m), lanes[0, i])
                if first == g * grain:
                    _begin_grain(places[i], cuts[i], before[i], start // grain + g)
                _sparsify(delta, m, start + first, kinds[i], cuts[i], chances[i], spans[i], places[i], random, sorting)
                _add_sizes(delta, _whole(m), lanes[1, i])
        for side in range(2):
            for i in range(count):
                result[g, side, i] = _lanes_sum(lanes[side, i])
    return result


@_compiled
def task_vectors(
    data: Any,
    rows: Any,
    length: int,
    start: int,
    grain: int,
    tile: int,
    weights: Any,
    vote: int,
    normalize: bool,
    divisor: Any,
    scale: Any,
    kinds: Any,
    cuts: Any,
    before: Any,
    chances: Any,
    spans: Any,
    scales: Any,
    out: Any,
) -> None:
    """Sparsify, weight, agree, add to the base. Twin of :func:`.task_vectors.mix`; ``vote``: 0 none, 1 sum, 2 count."""
    count = len(rows) - 1
    base, total, shares = np.empty(tile, np.float32), np.empty(tile, np.float32), np.empty(tile, np.float32)
    elected = np.empty(tile, np.float32)
    weighted = np.empty((count, tile), np.float32)
    random = np.empty(tile + 2, np.uint32)
    places, sorting = np.zeros((count, 2), np.int64), np.empty((3, tile), np.uint32)
    zero, one = np.float32(0.0), np.float32(1.0)
    for first in range(0, length, tile):
        m = min(tile, length - first)
        _widen(data, rows[0] + first, base[:m])
        for i in range(count):
            delta, weight, factor = weighted[i], weights[i], scales[i]
            _widen(data, rows[i + 1] + first, delta[:m])
            for j in range(m):
                delta[j] -= base[j]
            if first % grain == 0:
                _begin_grain(places[i], cuts[i], before[i], (start + first) // grain)
            _sparsify(delta, m, start + first, kinds[i], cuts[i], chances[i], spans[i], places[i], random, sorting)
            if factor != one:
                for j in range(m):
                    delta[j] *= factor
            for j in range(m):
                delta[j] *= weight
        if vote == 0:
            total[:m] = weighted[0, :m]
            for i in range(1, count):
                for j in range(m):
                    total[j] += weighted[i, j]
            for j in range(m):
                total[j] /= divisor
        else:
            _elect(weighted, m, vote, elected)
            total[:m] = zero
            shares[:m] = zero
            for i in range(count):
                weight = weights[i]
                for j in range(m):
                    counts = weighted[i, j] * elected[j] > zero
                    total[j] += weighted[i, j] if counts else zero
                    shares[j] += weight if counts else zero
            if normalize:
                for j in range(m):
                    total[j] /= one if shares[j] == zero else shares[j]
        for j in range(m):
            total[j] = base[j] + total[j] * scale
        _narrow(total[:m], out, first)


@_compiled
def inspect(out: Any, exponent: int) -> Any:
    """Number of elements that are NaN or infinite, and whether any is not zero, from bit patterns (uint16 or uint32).

    ``exponent`` is the mask of the exponent bits, all of which are set in NaN and infinity and in no other number.
    """
    bits = out.dtype.type(exponent)
    broken, seen = 0, out.dtype.type(0)
    for j in range(len(out)):
        broken += (out[j] & bits) == bits
        seen |= out[j] << out.dtype.type(1)  # Without the sign: -0 is zero.
    return broken, seen != 0


@_compiled
def _elect(weighted: Any, m: int, vote: int, elected: Any) -> None:
    elected[:m] = np.float32(0.0)
    for i in range(len(weighted)):
        for j in range(m):
            value = weighted[i, j]
            elected[j] += value if vote == 1 else np.float32(value > 0) - np.float32(value < 0)
    for j in range(m):
        elected[j] = np.float32(1.0) if elected[j] >= np.float32(0.0) else np.float32(-1.0)


@_compiled
def _begin_grain(places: Any, cuts: Any, before: Any, grain: int) -> None:
    """Where numbering of equal scores stands at the start of a grain, mapped by the stride."""
    for side in range(2):
        wanted, tied, stride = cuts[side, 1], cuts[side, 2], cuts[side, 3]
        if 0 < wanted < tied:
            places[side] = before[side, grain] * stride % tied


@_compiled
def _sparsify(
    delta: Any,
    m: int,
    index: int,
    kind: int,
    cuts: Any,
    chance: Any,
    span: Any,
    places: Any,
    random: Any,
    sorting: Any,
) -> None:
    """Set dropped elements to zero. Kinds as in :meth:`.sparsify.Sparsifier.tables`."""
    zero = np.float32(0.0)
    if kind == 1:
        delta[:m] = zero
    elif kind == 2:
        patterns = delta.view(np.uint32)
        low, high = cuts[0], cuts[1]
        low_part, high_part = low[1] < low[2], high[1] < high[2]
        if low_part and high_part and low[0] == high[0]:
            _drop_ties_of_both(delta, patterns, m, low, high, places)
        else:
            least, most = np.uint32(low[0]), np.uint32(high[0] if high_part else high[0] - 1)
            for j in range(m):
                size = patterns[j] & _SIZE
                delta[j] = delta[j] if least <= size <= most else zero
            if low_part:
                _drop_ties(delta, patterns, m, low, places, 0)
            if high_part:
                _drop_ties(delta, patterns, m, high, places, 1)
    elif kind == 3:
        _words(chance[1], chance[2], index, m, random)
        shift = index % 2
        limit = np.uint32(chance[0])
        for j in range(m):
            delta[j] = delta[j] if random[j + shift] < limit else zero
    elif kind == 4:
        _words(chance[1], chance[2], index, m, random)
        shift = index % 2
        _rank(delta.view(np.uint32), m, sorting)
        ranks, steps = sorting[0], np.float64(m - 1)
        for j in range(m):
            share = np.float64(ranks[j]) / steps if m > 1 else 0.5
            limit_here = (span[0] + (span[1] - span[0]) * share) * 4294967296.0
            delta[j] = delta[j] if np.float64(random[j + shift]) < limit_here else zero


@_compiled
def _rank(patterns: Any, m: int, sorting: Any) -> None:
    """Rank of every size among ``m`` into ``sorting[0]``, equal ones in their order: a radix sort by 11 bits."""
    order, spare = sorting[1], sorting[2]
    table = np.empty(2049, np.int64)
    for j in range(m):
        order[j] = j
    for shift in (0, 11, 22):
        table[:] = 0
        for j in range(m):
            table[(((patterns[j] & _SIZE) >> np.uint32(shift)) & np.uint32(2047)) + 1] += 1
        for d in range(2048):
            table[d + 1] += table[d]
        for j in range(m):
            item = order[j]
            digit = ((patterns[item] & _SIZE) >> np.uint32(shift)) & np.uint32(2047)
            spare[table[digit]] = item
            table[digit] += 1
        order, spare = spare, order
    for j in range(m):
        sorting[0, order[j]] = j


@_compiled
def _drop_ties(delta: Any, patterns: Any, m: int, cut: Any, places: Any, side: int) -> None:
    """Of the elements at a cut, drop those not wanted (low side, 0) or those wanted by the outliers (high side, 1)."""
    key, wanted, tied, stride = np.uint32(cut[0]), cut[1], cut[2], cut[3]
    place = places[side]
    for j in range(m):
        if patterns[j] & _SIZE == key:
            if (place < wanted) == (side == 1):
                delta[j] = np.float32(0.0)
            place += stride
            place -= tied if place >= tied else 0
    places[side] = place


@_compiled
def _drop_ties_of_both(delta: Any, patterns: Any, m: int, low: Any, high: Any, places: Any) -> None:
    """Both cuts fall on one size: an element there is kept when the low side wants it and the high side does not."""
    key = np.uint32(low[0])
    place = places[0]
    for j in range(m):
        size = patterns[j] & _SIZE
        if size == key:
            if place >= low[1] or place < high[1]:
                delta[j] = np.float32(0.0)
            place += low[3]
            place -= low[2] if place >= low[2] else 0
        else:
            delta[j] = np.float32(0.0)
    places[0] = place


@_compiled
def _words(key: int, upper: int, index: int, count: int, words: Any) -> None:
    """Random words of the elements from ``index - index % 2``. Twin of :func:`.masks.words`."""
    first = index // 2
    for p in range((count + 1 + index % 2) // 2):
        low, high = np.uint64((first + p) & 0xFFFFFFFF), np.uint64(upper)
        round_key = np.uint64(key)
        for _ in range(ROUNDS):
            product = low * np.uint64(MULTIPLIER)
            low = (product >> np.uint64(32)) ^ high ^ round_key
            high = product & _WORD
            round_key = (round_key + np.uint64(WEYL)) & _WORD
        words[2 * p] = np.uint32(low)
        words[2 * p + 1] = np.uint32(high)


@_compiled
def _whole(m: int) -> int:
    """Elements of the lanes that ``m`` elements touch."""
    return (m + LANES - 1) // LANES * LANES


@_compiled
def _add_products(one: Any, other: Any, m: int, lanes: Any) -> None:
    for first in range(0, m, LANES):
        a, b = one[first : first + LANES], other[first : first + LANES]
        for j in range(LANES):
            lanes[j] += a[j] * b[j]


@_compiled
def _add_sizes(vector: Any, m: int, lanes: Any) -> None:
    for first in range(0, m, LANES):
        part = vector[first : first + LANES]
        for j in range(LANES):
            lanes[j] += np.float64(abs(part[j]))


@_compiled
def _lanes_sum(lanes: Any) -> Any:
    total = lanes.copy()
    half = LANES // 2
    while half:
        for j in range(half):
            total[j] += total[j + half]
        half //= 2
    return total[0]

"""Kernels for the passes of :mod:`merge_core.methods.selection`: count scores by their bits, and scan windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.tiles import TILE, compiled, inner, magnitude_bits, widen


@compiled
def sizes(data: Any, rows: Any, length: int) -> Any:
    """Return the magnitudes ``|x_i - b|``: ``[models, elements]``."""
    base, result = np.empty(TILE, np.float32), np.empty((len(rows) - 1, length), np.float32)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        for i in range(len(result)):
            part = result[i, first : first + m]
            widen(data, rows[i + 1] + first, part)
            for j in range(m):
                part[j] = abs(part[j] - base[j])
    return result


@compiled
def first_digits(data: Any, rows: Any, length: int) -> Any:
    """Count the values of the leading 16 bits of ``|x_i - b|``: ``[models, 65536]``."""
    count = len(rows) - 1
    base, delta, places = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.uint32)
    # Alternate between two tables: equal neighbors would wait for each other's store.
    even, odd = np.zeros((count, 65536), np.uint32), np.zeros((count, 65536), np.uint32)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        for i in range(count):
            widen(data, rows[i + 1] + first, delta[:m])
            for j in range(m):
                places[j] = magnitude_bits(delta[j] - base[j]) >> np.uint32(15)
            for j in range(0, m - 1, 2):
                even[i, places[j]] += np.uint32(1)
                odd[i, places[j + 1]] += np.uint32(1)
            if m % 2:
                even[i, places[m - 1]] += np.uint32(1)
    return _sums(even, odd)


@compiled
def next_digits(data: Any, rows: Any, length: int, streams: Any, prefixes: Any, shift: int, width: int) -> Any:
    """Count the next ``width`` bits of the magnitudes that start with each prefix: ``[requests, 2**width]``."""
    base, delta = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    counted = np.zeros((len(streams), 1 << width), np.uint32)
    mask = np.uint32((1 << width) - 1)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        for r in range(len(streams)):
            widen(data, rows[streams[r] + 1] + first, delta[:m])
            prefix = np.uint32(prefixes[r])
            for j in range(m):
                delta[j] -= base[j]
            for j in range(m):
                size = magnitude_bits(delta[j])
                if size >> np.uint32(shift + width) == prefix:
                    counted[r, (size >> np.uint32(shift)) & mask] += np.uint32(1)
    return counted


@compiled
def ties(data: Any, rows: Any, length: int, grain: int, streams: Any, keys: Any) -> Any:
    """Count the magnitudes in each grain that equal each of ``keys``: ``[grains, requests]``."""
    base, delta = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    counted = np.zeros(((length + grain - 1) // grain, len(streams)), np.int64)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        for r in range(len(streams)):
            widen(data, rows[streams[r] + 1] + first, delta[:m])
            key = np.uint32(keys[r])
            for j in range(m):
                delta[j] -= base[j]
            equal = np.uint32(0)
            for j in range(m):
                equal += np.uint32(magnitude_bits(delta[j]) == key)
            counted[first // grain, r] += equal
    return counted


@compiled
def first_digit_of(scores: Any, shift: int, bins: int) -> Any:
    """Count the values of the bits above ``shift`` in non-negative float32 scores: ``[streams, bins]``."""
    even, odd = np.zeros((len(scores), bins), np.uint32), np.zeros((len(scores), bins), np.uint32)
    places = np.empty(TILE, np.uint32)
    for i in range(len(scores)):
        for first in range(0, scores.shape[1], TILE):
            part = scores[i, first : first + TILE]
            m = len(part)
            for j in range(m):
                places[j] = magnitude_bits(part[j]) >> np.uint32(shift)
            for j in range(0, m - 1, 2):
                even[i, places[j]] += np.uint32(1)
                odd[i, places[j + 1]] += np.uint32(1)
            if m % 2:
                even[i, places[m - 1]] += np.uint32(1)
    return _sums(even, odd)


@compiled
def next_digit_of(scores: Any, streams: Any, prefixes: Any, shift: int, width: int) -> Any:
    """Count the next ``width`` bits among the scores that start with each prefix: ``[requests, 2**width]``."""
    counted = np.zeros((len(streams), 1 << width), np.uint32)
    mask = np.uint32((1 << width) - 1)
    for r in range(len(streams)):
        stream, prefix = scores[streams[r]], np.uint32(prefixes[r])
        for j in range(len(stream)):
            size = magnitude_bits(stream[j])
            if size >> np.uint32(shift + width) == prefix:
                counted[r, (size >> np.uint32(shift)) & mask] += np.uint32(1)
    return counted


@compiled
def ties_of(scores: Any, grain: int, streams: Any, keys: Any) -> Any:
    """Count the scores in each grain that equal each of ``keys``: ``[grains, requests]``."""
    counted = np.zeros(((scores.shape[1] + grain - 1) // grain, len(streams)), np.int64)
    for r in range(len(streams)):
        stream, key = scores[streams[r]], np.uint32(keys[r])
        for g in range(len(counted)):
            equal = np.uint32(0)
            for j in range(g * grain, min(len(stream), (g + 1) * grain)):
                equal += np.uint32(magnitude_bits(stream[j]) == key)
            counted[g, r] = equal
    return counted


@compiled
def scan_windows(
    scores: Any,
    windows: Any,
    common: Any,
    grain: int,
    above: Any,
    positive: Any,
    counts: Any,
    keys: Any,
    filled_count: Any,
) -> None:
    """Scan one part of a block for scores inside and above windows. The last five arguments are updated in place.

    Args:
        scores: ``[streams, elements]``, non-negative.
        windows: ``[requests, 3]``: stream, smallest key in the window, smallest key above it.
        common: ``[requests, n]``: keys in the window to count instead of storing. Unused entries are 2**32 - 1.
        grain: Number of elements in a grain.
        above: ``[requests]``: number of scores above the window.
        positive: ``[streams]``: number of scores above zero.
        counts: ``[grains of this part, requests, n + 1]``: number of each common key, then of all other keys inside.
        keys: ``[requests, capacity]``: the other keys inside the window, in element order.
        filled_count: ``[requests]``: number of other keys. It exceeds the capacity if they do not fit.
    """
    inside, capacity, common_keys = np.empty(TILE, np.uint32), keys.shape[1], common.shape[1]
    for s in range(len(scores)):
        stream, number = scores[s], np.int64(0)
        for j in range(len(stream)):
            number += np.int64(magnitude_bits(stream[j]) != 0)
        positive[s] += number
    for r in range(len(windows)):
        stream = scores[windows[r, 0]]
        low, high, length = np.uint32(windows[r, 1]), np.uint32(windows[r, 2]), len(stream)
        for first in range(0, length, TILE):
            tile = stream[first : min(first + TILE, length)]
            over, n = np.uint32(0), 0
            for j in range(len(tile)):
                over += np.uint32(magnitude_bits(tile[j]) >= high)
            above[r] += over
            for j in range(len(tile)):
                key = magnitude_bits(tile[j])
                inside[n] = key
                n += (key >= low) & (key < high)
            part_counts, other_count = counts[first // grain, r], np.int64(n)
            for c in range(common_keys):
                same, common_key = np.uint32(0), common[r, c]
                for j in range(n):
                    same += np.uint32(inside[j] == common_key)
                part_counts[c] += same
                other_count -= np.int64(same)
            part_counts[common_keys] += other_count
            if filled_count[r] + other_count > capacity:
                filled_count[r] = capacity + 1
            elif other_count:
                position = filled_count[r]
                for j in range(n):
                    is_common = False
                    for c in range(common_keys):
                        is_common |= inside[j] == common[r, c]
                    if not is_common:
                        keys[r, position] = inside[j]
                        position += 1
                filled_count[r] = position


@inner
def _sums(even: Any, odd: Any) -> Any:
    """Add the second table of counts to the first, and return the first."""
    for i in range(len(even)):
        for j in range(even.shape[1]):
            even[i, j] += odd[i, j]
    return even

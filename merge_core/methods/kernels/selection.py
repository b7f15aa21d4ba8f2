"""Counting scores by their bits. Counterparts of the passes of :func:`merge_core.methods.selection.select`."""

from __future__ import annotations

from typing import Any

import numpy as np

from merge_core.methods.kernels.compiled import compiled
from merge_core.methods.kernels.tiles import SIZE, TILE, widen


@compiled
def sizes(data: Any, rows: Any, length: int) -> Any:
    """``|x_i - b|``: ``[models, elements]``."""
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
    """Counts of the leading 16 bits of ``|x_i - b|``: ``[models, 65536]``; the first pass of ``select``."""
    count = len(rows) - 1
    base, delta = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    patterns = delta.view(np.uint32)
    # Two tables in turns: equal neighbours would wait for each other's store.
    even, odd = np.zeros((count, 65536), np.uint32), np.zeros((count, 65536), np.uint32)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        for i in range(count):
            widen(data, rows[i + 1] + first, delta[:m])
            for j in range(m):
                delta[j] -= base[j]
            for j in range(m):
                patterns[j] = (patterns[j] & SIZE) >> np.uint32(15)
            for j in range(0, m - 1, 2):
                even[i, patterns[j]] += np.uint32(1)
                odd[i, patterns[j + 1]] += np.uint32(1)
            if m % 2:
                even[i, patterns[m - 1]] += np.uint32(1)
    even += odd
    return even


@compiled
def next_digits(data: Any, rows: Any, length: int, streams: Any, prefixes: Any, shift: int, width: int) -> Any:
    """Counts of the next bits of scores with the wanted prefix: ``[requests, 2**width]``."""
    base, delta = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    patterns = delta.view(np.uint32)
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
                pattern = patterns[j] & SIZE
                if pattern >> np.uint32(shift + width) == prefix:
                    counted[r, (pattern >> np.uint32(shift)) & mask] += np.uint32(1)
    return counted


@compiled
def ties(data: Any, rows: Any, length: int, grain: int, streams: Any, keys: Any) -> Any:
    """Number of scores equal to the wanted key in each grain: ``[grains, requests]``."""
    base, delta = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    patterns = delta.view(np.uint32)
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
                equal += np.uint32((patterns[j] & SIZE) == key)
            counted[first // grain, r] += equal
    return counted


@compiled
def first_digit_of(scores: Any, shift: int, bins: int) -> Any:
    """Counts of the bits from ``shift`` upwards of non-negative float32 scores: ``[streams, bins]``."""
    even, odd = np.zeros((len(scores), bins), np.uint32), np.zeros((len(scores), bins), np.uint32)
    places = np.empty(TILE, np.uint32)
    for i in range(len(scores)):
        for first in range(0, scores.shape[1], TILE):
            patterns = scores[i, first : first + TILE].view(np.uint32)
            m = len(patterns)
            for j in range(m):
                places[j] = (patterns[j] & SIZE) >> np.uint32(shift)
            for j in range(0, m - 1, 2):
                even[i, places[j]] += np.uint32(1)
                odd[i, places[j + 1]] += np.uint32(1)
            if m % 2:
                even[i, places[m - 1]] += np.uint32(1)
    even += odd
    return even


@compiled
def next_digit_of(scores: Any, streams: Any, prefixes: Any, shift: int, width: int) -> Any:
    """Counts of the next bits of the scores with the wanted prefix: ``[requests, 2**width]``."""
    counted = np.zeros((len(streams), 1 << width), np.uint32)
    mask = np.uint32((1 << width) - 1)
    for r in range(len(streams)):
        patterns, prefix = scores[streams[r]].view(np.uint32), np.uint32(prefixes[r])
        for j in range(len(patterns)):
            pattern = patterns[j] & SIZE
            if pattern >> np.uint32(shift + width) == prefix:
                counted[r, (pattern >> np.uint32(shift)) & mask] += np.uint32(1)
    return counted


@compiled
def ties_of(scores: Any, grain: int, streams: Any, keys: Any) -> Any:
    """Number of scores equal to the wanted key in each grain: ``[grains, requests]``."""
    counted = np.zeros(((scores.shape[1] + grain - 1) // grain, len(streams)), np.int64)
    for r in range(len(streams)):
        patterns, key = scores[streams[r]].view(np.uint32), np.uint32(keys[r])
        for g in range(len(counted)):
            equal = np.uint32(0)
            for j in range(g * grain, min(len(patterns), (g + 1) * grain)):
                equal += np.uint32((patterns[j] & SIZE) == key)
            counted[g, r] = equal
    return counted

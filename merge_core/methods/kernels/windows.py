"""Kernel that scans scores above and inside windows. Counterpart of the pass in :mod:`merge_core.methods.windows`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import TILE, magnitude_bits


@compiled
def scan_windows(
    scores: Any, windows: Any, common: Any, grain: int, above: Any, positive: Any, counts: Any, keys: Any, filled: Any
) -> None:
    """Add the results of one part of a block to those of the previous parts.

    Args:
        scores: ``[streams, elements]``, non-negative.
        windows: ``[requests, 3]``: stream, first key, and the key after the last.
        common: ``[requests, n]``: keys inside that are only counted. Unused entries are 2**32 - 1.
        grain: Elements per grain.
        above: ``[requests]``: number of scores above the window.
        positive: ``[streams]``: number of scores above zero.
        counts: ``[grains of this part, requests, n + 1]``: number of each common key, then of all other keys inside.
        keys: ``[requests, capacity]``: the other keys, in order.
        filled: ``[requests]``: number of other keys. If they do not fit, it exceeds the capacity.
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
            if filled[r] + other_count > capacity:
                filled[r] = capacity + 1
            elif other_count:
                position = filled[r]
                for j in range(n):
                    is_common = False
                    for c in range(common_keys):
                        is_common |= inside[j] == common[r, c]
                    if not is_common:
                        keys[r, position] = inside[j]
                        position += 1
                filled[r] = position

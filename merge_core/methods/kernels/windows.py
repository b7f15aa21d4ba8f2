"""Scores above and inside narrow windows. Counterpart of the pass in :mod:`merge_core.methods.windows`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import TILE, magnitude_bits


@compiled
def scan_windows(
    scores: Any, windows: Any, common: Any, grain: int, above: Any, positive: Any, counts: Any, keys: Any, filled: Any
) -> None:
    """Add what one part of a block has to what the parts before it had.

    Args:
        scores: ``[streams, elements]``, non-negative.
        windows: ``[requests, 3]``: stream, first key, the key after the last.
        common: ``[requests, n]``: keys inside that are only counted; those that are not needed are 2**32 - 1.
        grain: Elements per grain.
        above: ``[requests]``, how many are above the window.
        positive: ``[streams]``, how many are above zero.
        counts: ``[grains of this part, requests, n + 1]``: of each common key, then of all others inside.
        keys: ``[requests, room]``: the others, in their order.
        filled: ``[requests]``: how many there are; more than there is room for when they did not fit.
    """
    inside, room, several = np.empty(TILE, np.uint32), keys.shape[1], common.shape[1]
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
            here, others = counts[first // grain, r], np.int64(n)
            for c in range(several):
                same, wanted = np.uint32(0), common[r, c]
                for j in range(n):
                    same += np.uint32(inside[j] == wanted)
                here[c] += same
                others -= np.int64(same)
            here[several] += others
            if filled[r] + others > room:
                filled[r] = room + 1
            elif others:
                place = filled[r]
                for j in range(n):
                    known = False
                    for c in range(several):
                        known |= inside[j] == common[r, c]
                    if not known:
                        keys[r, place] = inside[j]
                        place += 1
                filled[r] = place

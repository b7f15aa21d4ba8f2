"""Dropping elements of a task vector in place. Counterpart of :mod:`merge_core.methods.sparsify`."""

from __future__ import annotations

from typing import Any

import numpy as np

from merge_core.methods.kernels.compiled import compiled
from merge_core.methods.kernels.ranks import keep_by_rank
from merge_core.methods.kernels.tiles import SIZE
from merge_core.methods.masks import MULTIPLIER, ROUNDS, WEYL

_WORD = np.uint64(0xFFFFFFFF)


@compiled
def sparsify(
    delta: Any,
    m: int,
    index: int,
    kind: int,
    cuts: Any,
    chance: Any,
    span: Any,
    places: Any,
    random: Any,
    scratch: Any,
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
                size = patterns[j] & SIZE
                delta[j] = delta[j] if least <= size <= most else zero
            if low_part:
                _drop_ties(delta, patterns, m, low, places, 0)
            if high_part:
                _drop_ties(delta, patterns, m, high, places, 1)
    elif kind == 3:
        words(chance[1], chance[2], index, m, random)
        shift = index % 2
        limit = np.uint32(chance[0])
        for j in range(m):
            delta[j] = delta[j] if random[j + shift] < limit else zero
    elif kind == 4:
        words(chance[1], chance[2], index, m, random)
        keep_by_rank(delta, m, random[index % 2 :], span[0], span[1], scratch)


@compiled
def begin_grain(places: Any, cuts: Any, before: Any, grain: int) -> None:
    """Where numbering of equal scores stands at the start of a grain, mapped by the stride."""
    for side in range(2):
        wanted, tied, stride = cuts[side, 1], cuts[side, 2], cuts[side, 3]
        if 0 < wanted < tied:
            places[side] = before[side, grain] * stride % tied


@compiled
def _drop_ties(delta: Any, patterns: Any, m: int, cut: Any, places: Any, side: int) -> None:
    """Of the elements at a cut, drop those not wanted (low side, 0) or those wanted by the outliers (high side, 1)."""
    key, wanted, tied, stride = np.uint32(cut[0]), cut[1], cut[2], cut[3]
    place = places[side]
    for j in range(m):
        if patterns[j] & SIZE == key:
            if (place < wanted) == (side == 1):
                delta[j] = np.float32(0.0)
            place += stride
            place -= tied if place >= tied else 0
    places[side] = place


@compiled
def _drop_ties_of_both(delta: Any, patterns: Any, m: int, low: Any, high: Any, places: Any) -> None:
    """Both cuts fall on one size: an element there is kept when the low side wants it and the high side does not."""
    key = np.uint32(low[0])
    place = places[0]
    for j in range(m):
        size = patterns[j] & SIZE
        if size == key:
            if place >= low[1] or place < high[1]:
                delta[j] = np.float32(0.0)
            place += low[3]
            place -= low[2] if place >= low[2] else 0
        else:
            delta[j] = np.float32(0.0)
    places[0] = place


@compiled
def words(key: int, upper: int, index: int, count: int, words: Any) -> None:
    """Random words of the elements from ``index - index % 2``. Counterpart of :func:`.masks.words`."""
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

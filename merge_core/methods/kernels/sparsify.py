"""Kernels that drop elements of a task vector in place, and store masks of the kept elements with one bit per element.

Counterparts of :mod:`merge_core.methods.sparsify`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled, inner
from mergegate.merge_core.methods.kernels.ranks import keep_by_rank
from mergegate.merge_core.methods.kernels.tiles import magnitude_bits
from mergegate.merge_core.methods.masks import MULTIPLIER, ROUNDS, WEYL

_WORD = np.uint64(0xFFFFFFFF)


@inner
def sparsify(
    delta: Any,
    m: int,
    index: int,
    model: int,
    kinds: Any,
    cuts: Any,
    chances: Any,
    spans: Any,
    tie_numbers: Any,
    random: Any,
    scratch: Any,
) -> None:
    """Set the dropped elements of one model's task vector to zero.

    :meth:`.sparsify.Sparsifier.tables` describes the tables. Numba omits the code for tables that are None.
    """
    kind, zero = kinds[model], np.float32(0.0)
    if kind == 1:
        delta[:m] = zero
    elif cuts is not None and kind == 2:
        low, high = cuts[model, 0], cuts[model, 1]
        low_part, high_part = low[1] < low[2], high[1] < high[2]
        least, most = np.uint32(low[0]), np.uint32(high[0] if high_part else high[0] - 1)
        for j in range(m):
            delta[j] = delta[j] if least <= magnitude_bits(delta[j]) <= most else zero
        # Keep elements that the low threshold selects and the high one does not. If they are equal, do it in one pass.
        both = low_part and high_part and low[0] == high[0]
        if low_part:
            keep_tied(delta, m, low, high[1] if both else 0, low[1], tie_numbers[model, :1])
        if high_part and not both:
            keep_tied(delta, m, high, high[1], high[2], tie_numbers[model, 1:])
    elif chances is not None and kind == 3:
        mask_words(chances[model, 1], chances[model, 2], index, m, random)
        shift = index % 2
        limit = np.uint32(chances[model, 0])
        for j in range(m):
            delta[j] = delta[j] if random[j + shift] < limit else zero
    elif spans is not None and kind == 4:
        mask_words(chances[model, 1], chances[model, 2], index, m, random)
        keep_by_rank(delta, m, random[index % 2 :], spans[model, 0], spans[model, 1], scratch)


@inner
def begin_tie_numbers(tie_numbers: Any, cuts: Any, before: Any, model: int, grain: int) -> None:
    """Set the tie numbers of a model at the start of a grain, for both thresholds."""
    for side in range(2):
        begin_numbering(tie_numbers[model, side : side + 1], cuts[model, side], before[model, side], grain)


@inner
def begin_numbering(tie_number: Any, cut: Any, before: Any, grain: int) -> None:
    """Set ``tie_number[0]`` to the number of the first tie in grain ``grain``, mapped by the stride."""
    if 0 < cut[1] < cut[2]:
        tie_number[0] = before[grain] * cut[3] % cut[2]


@inner
def keep_tied(values: Any, m: int, cut: Any, first: int, last: int, tie_number: Any) -> None:
    """Set ties in ``values[:m]`` to zero unless the stride maps their number to ``first`` <= number < ``last``.

    ``cut`` is (key, quota, tied, stride). ``tie_number[0]`` is the mapped number of the next tie, updated in place.
    """
    key, tied, stride, number = np.uint32(cut[0]), cut[2], cut[3], tie_number[0]
    for j in range(m):
        if magnitude_bits(values[j]) == key:
            if number < first or number >= last:
                values[j] = np.float32(0.0)
            number += stride
            number -= tied if number >= tied else 0
    tie_number[0] = number


@compiled
def mask_words(key: int, upper: int, index: int, count: int, words: Any) -> None:
    """Write the random words for elements from ``index - index % 2``. Counterpart of :func:`.masks.mask_words`."""
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


@inner
def store_mask(delta: Any, m: int, bits: Any) -> None:
    """Store in ``bits`` which elements of the sparsified ``delta[:m]`` are not zero.

    ``bits`` has ``m / 8`` bytes, rounded up. Bit ``t`` of byte ``i`` belongs to element ``t * len(bits) + i``, so that
    loops over bytes are loops over neighboring elements.
    """
    step = len(bits)
    bits[:] = np.uint8(0)
    for t in range(8):
        part = delta[t * step : min((t + 1) * step, m)]
        for i in range(len(part)):
            bits[i] |= np.uint8(magnitude_bits(part[i]) != 0) << np.uint8(t)


@inner
def apply_mask(delta: Any, m: int, bits: Any) -> None:
    """Set the elements of ``delta[:m]`` to zero whose bits :func:`store_mask` did not set."""
    step = len(bits)
    for t in range(8):
        part = delta[t * step : min((t + 1) * step, m)]
        for i in range(len(part)):
            mask = np.uint32(0) - (np.uint32(bits[i]) >> np.uint32(t) & np.uint32(1))
            part[i] = np.uint32(np.float32(part[i]).view(np.uint32) & mask).view(np.float32)

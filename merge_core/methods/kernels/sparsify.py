"""Dropping elements of a task vector in place. Counterpart of :mod:`merge_core.methods.sparsify`."""

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
    places: Any,
    random: Any,
    scratch: Any,
) -> None:
    """Set dropped elements of one model's task vector to zero.

    Kinds and tables are those of :meth:`.sparsify.Sparsifier.tables`. Where a table is None no model has a rule that
    reads it, and numba leaves out the code of such rules: most of what there is to compile.
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
        # Kept are those that the low side wants and the high side does not: where both cut one size, in one go.
        both = low_part and high_part and low[0] == high[0]
        if low_part:
            keep_tied(delta, m, low, high[1] if both else 0, low[1], places[model, :1])
        if high_part and not both:
            keep_tied(delta, m, high, high[1], high[2], places[model, 1:])
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
def begin_grain(places: Any, cuts: Any, before: Any, model: int, grain: int) -> None:
    """Where numbering of equal scores stands at the start of a grain, on both sides of a model."""
    for side in range(2):
        begin_numbering(places[model, side : side + 1], cuts[model, side], before[model, side], grain)


@inner
def begin_numbering(place: Any, cut: Any, before: Any, grain: int) -> None:
    """Where numbering of equal scores stands at the start of a grain, mapped by the stride.

    Args:
        place: ``[1]``, what is set.
        cut: ``[4]``: key, wanted, tied, stride.
        before: How many equal ones lie before each grain.
    """
    if 0 < cut[1] < cut[2]:
        place[0] = before[grain] * cut[3] % cut[2]


@inner
def keep_tied(values: Any, m: int, cut: Any, first: int, last: int, place: Any) -> None:
    """Of the elements at a cut, keep those that the stride maps to numbers from ``first`` to below ``last``; the others
    are set to zero.

    Args:
        cut: ``[4]``: key, wanted, tied, stride.
        place: ``[1]``, the number of the next one, in place.
    """
    key, tied, stride, at = np.uint32(cut[0]), cut[2], cut[3], place[0]
    for j in range(m):
        if magnitude_bits(values[j]) == key:
            if at < first or at >= last:
                values[j] = np.float32(0.0)
            at += stride
            at -= tied if at >= tied else 0
    place[0] = at


@compiled
def mask_words(key: int, upper: int, index: int, count: int, words: Any) -> None:
    """Random words of the elements from ``index - index % 2``. Counterpart of :func:`.masks.mask_words`."""
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

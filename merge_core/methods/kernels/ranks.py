"""Which elements of a row are kept by chance and rank, without sorting it. Counterpart of ``KeepByRank`` in
:mod:`merge_core.methods.sparsify`.

An element is kept when its random word is below a limit that rises with its rank, from that of the smallest element to
that of the largest. Most words are below the one or not below the other: nothing else is asked of those elements. The
others are looked up in a histogram of the row. Where all in a bin are equal, as nearly always with bfloat16 weights,
ranks follow from their order; else a bin says between which ranks theirs lies, and mostly both have the same answer.
What is still open is counted exactly; only where that is too much the row is sorted after all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import inner
from mergegate.merge_core.methods.kernels.tiles import magnitude_bits

_WORD = np.uint64(0xFFFFFFFF)
# Most bins of a histogram, as a power of two, and how many bits of a bin's number are exponents: bins span eight
# binades from the largest element down. The first bin has the zeros, the second all that is smaller than the others.
_MOST_BINS, _BINADES = 13, 3
# Counting one rank takes as long as a thirtieth of a sort; past this many, sort.
_COUNTED = 32
# A bin is one word: how many are in it, and from these bits on which of the lowest bits any of them has, or lacks.
_HAS, _LACKS = np.uint64(28), np.uint64(46)
_NUMBER = np.uint64((1 << 28) - 1)


@inner
def rank_scratch(tile: int) -> Any:
    """Memory for rows of up to ``tile`` elements."""
    return np.empty((7, tile), np.uint32)


@inner
def keep_by_rank(delta: Any, m: int, random: Any, low: Any, high: Any, scratch: Any) -> None:
    """Set elements to zero whose random word is not below ``low`` to ``high``, by their rank in the row ``delta[:m]``.

    Zeros stay zeros, so their ranks count for the others only.
    """
    zero = np.float32(0.0)
    keys, places, orders, open_ones = scratch[0], scratch[1], scratch[2], scratch[3]
    lowest, highest, drawn = scratch[4], scratch[5], scratch[6]
    least, most = _limit(0.0, m, low, high), _limit(np.float64(m - 1), m, low, high)
    largest = np.uint32(0)
    for j in range(m):
        key = magnitude_bits(delta[j])
        keys[j] = key
        largest = max(largest, key)
    from_word, to_word = np.int64(np.ceil(least)), np.int64(np.ceil(most))
    number = 0
    for j in range(m):
        delta[j] = delta[j] if np.int64(random[j]) < to_word else zero
    for j in range(m):
        drawn_here = np.int64(random[j])
        open_ones[number] = j
        number += (drawn_here >= from_word) & (drawn_here < to_word) & (keys[j] != 0)
    if number == 0:
        return
    width = 8
    while 1 << width < m and width < _MOST_BINS:
        width += 1
    bins = np.zeros((1 << width) + 1, np.uint64)
    _count(keys, m, largest, width, places, orders, bins)
    left = 0
    for n in range(number):  # Without branches, which nobody could predict; and so that most of it is vectorised.
        j = open_ones[n]
        place = places[j]
        this, after = bins[place], bins[place + 1]
        equal = np.uint32(this > _NUMBER)
        lowest[n] = np.uint32(this & _NUMBER) + equal * orders[j]
        highest[n] = equal * lowest[n] + (np.uint32(1) - equal) * (np.uint32(after & _NUMBER) - np.uint32(1))
        drawn[n] = random[j]
    for n in range(number):
        word = np.float64(drawn[n])
        kept = np.uint32(word < _limit(np.float64(highest[n]), m, low, high))
        drawn[n] = kept * (np.uint32(1) + np.uint32(word >= _limit(np.float64(lowest[n]), m, low, high)))
    for n in range(number):
        j = open_ones[n]
        delta[j] = delta[j] if drawn[n] != 0 else zero
        open_ones[left] = j
        left += drawn[n] == 2
    if left > _COUNTED:
        _rank(keys, m, places)
        for n in range(left):
            j = open_ones[n]
            if np.float64(random[j]) >= _limit(np.float64(places[j]), m, low, high):
                delta[j] = zero
    else:
        for n in range(left):
            j = open_ones[n]
            if np.float64(random[j]) >= _limit(np.float64(_rank_of(keys, m, j)), m, low, high):
                delta[j] = zero


@inner
def _limit(rank: float, m: int, low: Any, high: Any) -> Any:
    """Words below it are kept. The same operations as the reference's, of which each keeps the order of ranks."""
    share = rank / np.float64(m - 1) if m > 1 else 0.5
    return (low + (high - low) * share) * 4294967296.0


@inner
def _count(keys: Any, m: int, largest: Any, width: int, places: Any, orders: Any, bins: Any) -> None:
    """Bin of every key and its number among those in it; how many come before a bin, more if all in it are equal."""
    shift = np.uint32(23 + _BINADES - width)
    lowest = np.int32(largest >> shift) - np.int32((1 << width) - 1)
    for j in range(m):
        place = max(np.int32(keys[j] >> shift) - lowest, np.int32(1))
        places[j] = np.uint32(0) if keys[j] == 0 else np.uint32(place)
    below = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    one = np.uint64(1)
    for j in range(m):
        this, bits = bins[places[j]], np.uint64(keys[j]) & below
        orders[j] = np.uint32(this & _NUMBER)
        bins[places[j]] = (this + one) | bits << _HAS | (bits ^ below) << _LACKS
    running = np.uint64(0)
    for d in range(1 << width):
        this = bins[d]
        equal = (this >> _HAS) & (this >> _LACKS) & below == 0 and d != 1
        bins[d] = running | (one << _HAS if equal else np.uint64(0))
        running += this & _NUMBER
    bins[1 << width] = running


@inner
def _rank_of(keys: Any, m: int, place: int) -> Any:
    """Rank of one key among ``m``, equal ones in their order."""
    key, rank = keys[place], np.uint32(0)
    for j in range(place):
        rank += np.uint32(keys[j] <= key)
    for j in range(place, m):
        rank += np.uint32(keys[j] < key)
    return rank


@inner
def _rank(keys: Any, m: int, ranks: Any) -> None:
    """Rank of every key among ``m``, equal ones in their order: a radix sort by 11 bits."""
    items, spare = np.empty(m, np.uint64), np.empty(m, np.uint64)
    table, mask = np.zeros((3, 2048), np.uint32), np.uint64(2047)
    for j in range(m):
        size = np.uint64(keys[j])
        items[j] = size << np.uint64(32) | np.uint64(j)
        for digit in range(3):
            table[digit, size >> np.uint64(11 * digit) & mask] += np.uint32(1)
    for digit in range(3):
        places, shift = table[digit], np.uint64(32 + 11 * digit)
        if places[items[0] >> shift & mask] == m:
            continue  # All have the same; the low bits of what was bfloat16 are mostly zero.
        before = np.uint32(0)
        for d in range(2048):
            count = places[d]
            places[d] = before
            before += count
        for j in range(m):
            d = items[j] >> shift & mask
            spare[places[d]] = items[j]
            places[d] += np.uint32(1)
        items, spare = spare, items
    for j in range(m):
        ranks[items[j] & _WORD] = j

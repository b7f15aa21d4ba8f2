"""Keep elements of a row at random by rank, without sorting the row. Counterpart of :class:`.sparsify.KeepByRank`.

An element is kept if its random word is below a limit that rises with its rank. Most words are below the limit of the
lowest rank or above that of the highest, so the ranks of their elements do not matter. The other elements are looked up
in a histogram of the row. If all elements in a bin are equal, as in nearly all bins of bfloat16 weights, their ranks
follow from their order. If not, the bin bounds their ranks, and mostly both bounds give the same decision. The
remaining ranks are counted exactly, or the row is sorted if there are too many of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.tiles import inner, magnitude_bits

_WORD = np.uint64(0xFFFFFFFF)
# Largest number of bins in a histogram, as a power of two, and number of bits of a bin's index that are exponents: bins
# span eight binades from the largest element down. The first bin has the zeros, the second all smaller elements.
_MOST_BINS, _BINADES = 13, 3
# Counting one rank takes a thirtieth of the time of a sort. If there are more ranks to count, sort.
_COUNTED = 32
# A bin is one word: the number of its elements and, from these bits on, which of the lowest bits any of them has set or
# lacks.
_HAS, _LACKS = np.uint64(28), np.uint64(46)
_NUMBER = np.uint64((1 << 28) - 1)


@inner
def rank_scratch(tile: int) -> Any:
    """Return working memory for :func:`keep_by_rank` with rows of up to ``tile`` elements."""
    return np.empty((7, tile), np.uint32)


@inner
def keep_by_rank(delta: Any, m: int, random: Any, low: Any, high: Any, scratch: Any) -> None:
    """Set the elements of the row ``delta[:m]`` to zero whose random word is not below the limit for their rank.

    The probability rises with the rank from ``low`` to ``high``.
    """
    zero = np.float32(0.0)
    keys, places, orders, open_elements = scratch[0], scratch[1], scratch[2], scratch[3]
    lowest, highest, words = scratch[4], scratch[5], scratch[6]
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
        word_of_element = np.int64(random[j])
        open_elements[number] = j
        number += (word_of_element >= from_word) & (word_of_element < to_word) & (keys[j] != 0)
    if number == 0:
        return
    width = 8
    while 1 << width < m and width < _MOST_BINS:
        width += 1
    bins = np.zeros((1 << width) + 1, np.uint64)
    _count(keys, m, largest, width, places, orders, bins)
    left = 0
    for n in range(number):  # Without branches, which no processor could predict, and mostly vectorized.
        j = open_elements[n]
        index = places[j]
        bin_word, next_word = bins[index], bins[index + 1]
        equal = np.uint32(bin_word > _NUMBER)
        lowest[n] = np.uint32(bin_word & _NUMBER) + equal * orders[j]
        highest[n] = equal * lowest[n] + (np.uint32(1) - equal) * (np.uint32(next_word & _NUMBER) - np.uint32(1))
        words[n] = random[j]
    for n in range(number):
        word = np.float64(words[n])
        is_below_highest = np.uint32(word < _limit(np.float64(highest[n]), m, low, high))
        words[n] = is_below_highest * (np.uint32(1) + np.uint32(word >= _limit(np.float64(lowest[n]), m, low, high)))
    for n in range(number):
        j = open_elements[n]
        delta[j] = delta[j] if words[n] != 0 else zero
        open_elements[left] = j
        left += words[n] == 2
    if left > _COUNTED:
        _rank(keys, m, places)
        for n in range(left):
            j = open_elements[n]
            if np.float64(random[j]) >= _limit(np.float64(places[j]), m, low, high):
                delta[j] = zero
    else:
        for n in range(left):
            j = open_elements[n]
            if np.float64(random[j]) >= _limit(np.float64(_rank_of(keys, m, j)), m, low, high):
                delta[j] = zero


@inner
def _limit(rank: float, m: int, low: Any, high: Any) -> Any:
    """Return the limit below which random words are kept.

    These are the reference's operations, and each of them preserves the order of ranks.
    """
    share = rank / np.float64(m - 1) if m > 1 else 0.5
    return (low + (high - low) * share) * 4294967296.0


@inner
def _count(keys: Any, m: int, largest: Any, width: int, places: Any, orders: Any, bins: Any) -> None:
    """Compute the bin of every key and its index in the bin, and the number of elements before each bin.

    Bins whose elements are all equal have an extra bit.
    """
    shift = np.uint32(23 + _BINADES - width)
    lowest = np.int32(largest >> shift) - np.int32((1 << width) - 1)
    for j in range(m):
        index = max(np.int32(keys[j] >> shift) - lowest, np.int32(1))
        places[j] = np.uint32(0) if keys[j] == 0 else np.uint32(index)
    below = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    one = np.uint64(1)
    for j in range(m):
        bin_word, bits = bins[places[j]], np.uint64(keys[j]) & below
        orders[j] = np.uint32(bin_word & _NUMBER)
        bins[places[j]] = (bin_word + one) | bits << _HAS | (bits ^ below) << _LACKS
    running = np.uint64(0)
    for d in range(1 << width):
        bin_word = bins[d]
        equal = (bin_word >> _HAS) & (bin_word >> _LACKS) & below == 0 and d != 1
        bins[d] = running | (one << _HAS if equal else np.uint64(0))
        running += bin_word & _NUMBER
    bins[1 << width] = running


@inner
def _rank_of(keys: Any, m: int, index: int) -> Any:
    """Return the rank of one key among ``m``. Ties rank in element order."""
    key, rank = keys[index], np.uint32(0)
    for j in range(index):
        rank += np.uint32(keys[j] <= key)
    for j in range(index, m):
        rank += np.uint32(keys[j] < key)
    return rank


@inner
def _rank(keys: Any, m: int, ranks: Any) -> None:
    """Compute the rank of every key among ``m``, with ties in element order: a radix sort by 11 bits."""
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
            continue  # All keys have the same digit. The low bits of former bfloat16 numbers are mostly zero.
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

"""Convert between stored numbers and float32 tiles, and compute long sums in a defined order, for all kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from mergegate.merge_core.methods.kernels.compilation import compiled, inner

# Elements per tile. It divides the grain, so that a tile never crosses a grain boundary.
TILE = 1024
# Number of partial sums of a long sum, so that it can be vectorized in a defined order. It divides the tile.
LANES = 256
# All bits of a float32 except the sign.
SIZE = np.uint32(0x7FFFFFFF)


def widen(data: Any, first: int, tile: Any) -> None:
    """Convert stored numbers from ``data[first]`` to the float32 ``tile``."""
    raise NotImplementedError


@overload(widen)
def _widen_for(data: Any, first: Any, tile: Any) -> Any:
    if data.dtype == types.uint16:

        def bfloat16(data: Any, first: Any, tile: Any) -> Any:
            stored = data[first : first + len(tile)]
            for j in range(len(tile)):
                tile[j] = np.uint32(np.uint32(stored[j]) << np.uint32(16)).view(np.float32)

        return bfloat16

    def float32(data: Any, first: Any, tile: Any) -> Any:
        stored = data[first : first + len(tile)]
        for j in range(len(tile)):
            tile[j] = stored[j]

    return float32


def narrow(tile: Any, out: Any, first: int) -> None:
    """Convert the float32 ``tile`` to stored numbers from ``out[first]``, rounding half to even."""
    raise NotImplementedError


@overload(narrow)
def _narrow_for(tile: Any, out: Any, first: Any) -> Any:
    if out.dtype == types.uint16:

        def bfloat16(tile: Any, out: Any, first: Any) -> Any:
            stored = out[first : first + len(tile)]
            for j in range(len(tile)):
                pattern = np.float32(tile[j]).view(np.uint32)
                rounded = (pattern + np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                not_a_number = (pattern & SIZE) > np.uint32(0x7F800000)
                stored[j] = np.uint16(0x7FC0) if not_a_number else np.uint16(rounded)

        return bfloat16

    def float32(tile: Any, out: Any, first: Any) -> Any:
        stored = out[first : first + len(tile)]
        for j in range(len(tile)):
            stored[j] = tile[j]

    return float32


@compiled
def inspect(words: Any, mask: Any, low: Any) -> Any:
    """Combine 64-bit words, each with several numbers, into two words that show non-finite and nonzero numbers.

    ``mask`` has the exponent bits of each number in a word, and ``low`` the lowest exponent bit of each. In NaN and
    infinity, and only there, all exponent bits are set, so adding ``low`` carries into the sign bit. So the first word
    has a sign bit set if any number is not finite. The second has a bit other than the signs set if any is not zero.
    """
    carried, combined = words.dtype.type(0), words.dtype.type(0)
    for j in range(len(words)):
        carried |= (words[j] & mask) + low
        combined |= words[j]
    return carried, combined


@inner
def magnitude_bits(value: Any) -> Any:
    """Return the bits of a float32 except its sign: uint32, in the order of magnitudes."""
    return np.uint32(np.float32(value).view(np.uint32) & SIZE)


@inner
def lane_elements(m: int) -> int:
    """Return ``m`` rounded up to a multiple of the number of lanes."""
    return (m + LANES - 1) // LANES * LANES


@inner
def add_rows(rows: Any, m: int, total: Any) -> None:
    """Write the sum of all rows, added in order, into ``total[:m]``."""
    for i in range(len(rows)):
        row = rows[i]
        for j in range(m):
            total[j] = row[j] if i == 0 else total[j] + row[j]


@inner
def add_products(left: Any, right: Any, m: int, lanes: Any) -> None:
    for first in range(0, m, LANES):
        a, b = left[first : first + LANES], right[first : first + LANES]
        for j in range(LANES):
            lanes[j] += a[j] * b[j]


@inner
def add_sizes(vector: Any, m: int, lanes: Any) -> None:
    for first in range(0, m, LANES):
        part = vector[first : first + LANES]
        for j in range(LANES):
            lanes[j] += np.float64(abs(part[j]))


@inner
def lanes_sum(lanes: Any) -> Any:
    total = lanes.copy()
    half = LANES // 2
    while half:
        for j in range(half):
            total[j] += total[j + half]
        half //= 2
    return total[0]

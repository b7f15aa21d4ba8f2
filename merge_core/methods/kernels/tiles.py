"""Between stored numbers and float32 tiles, and long sums in one defined order: what all kernels are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from merge_core.methods.kernels.compiled import compiled

# Elements per tile; divides the grain, so that a tile never crosses one.
TILE = 1024
# Partial sums that a long sum is split into, so that it can be vectorised in one defined order; divides the tile.
LANES = 256
# All bits of a float32 but the sign.
SIZE = np.uint32(0x7FFFFFFF)


def widen(data: Any, first: int, tile: Any) -> None:
    """Stored numbers from ``data[first]`` → float32 ``tile``."""
    raise NotImplementedError


@overload(widen)
def _widen_for(data: Any, first: Any, tile: Any) -> Any:
    if data.dtype == types.uint16:

        def bfloat16(data: Any, first: Any, tile: Any) -> Any:
            patterns, stored = tile.view(np.uint32), data[first : first + len(tile)]
            for j in range(len(tile)):
                patterns[j] = np.uint32(stored[j]) << np.uint32(16)

        return bfloat16

    def float32(data: Any, first: Any, tile: Any) -> Any:
        stored = data[first : first + len(tile)]
        for j in range(len(tile)):
            tile[j] = stored[j]

    return float32


def narrow(tile: Any, out: Any, first: int) -> None:
    """Float32 ``tile`` → stored numbers from ``out[first]``, rounded to nearest even."""
    raise NotImplementedError


@overload(narrow)
def _narrow_for(tile: Any, out: Any, first: Any) -> Any:
    if out.dtype == types.uint16:

        def bfloat16(tile: Any, out: Any, first: Any) -> Any:
            patterns, stored = tile.view(np.uint32), out[first : first + len(tile)]
            for j in range(len(tile)):
                pattern = patterns[j]
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
def count_non_finite(bits: Any, exponent: int) -> Any:
    """Number of NaN and infinite elements, from bit patterns (unsigned integers).

    ``exponent`` is the mask of the exponent bits, all of which are set in NaN and infinity and in no other number.
    """
    mask, one = bits.dtype.type(exponent), bits.dtype.type(1)
    total = np.int64(0)
    for first in range(0, len(bits), TILE):
        tile, count = bits[first : first + TILE], bits.dtype.type(0)  # Of their own width: so it can be vectorised.
        for j in range(len(tile)):
            count += one if (tile[j] & mask) == mask else bits.dtype.type(0)
        total += np.int64(count)
    return total


@compiled
def inspect(out: Any, exponent: int) -> Any:
    """Number of elements that are NaN or infinite, and whether any is not zero; see :func:`count_non_finite`."""
    seen = out.dtype.type(0)
    for j in range(len(out)):
        seen |= out[j] << out.dtype.type(1)  # Without the sign: -0 is zero.
    return count_non_finite(out, exponent), seen != 0


@compiled
def whole(m: int) -> int:
    """Elements of the lanes that ``m`` elements touch."""
    return (m + LANES - 1) // LANES * LANES


@compiled
def add_products(one: Any, other: Any, m: int, lanes: Any) -> None:
    for first in range(0, m, LANES):
        a, b = one[first : first + LANES], other[first : first + LANES]
        for j in range(LANES):
            lanes[j] += a[j] * b[j]


@compiled
def add_sizes(vector: Any, m: int, lanes: Any) -> None:
    for first in range(0, m, LANES):
        part = vector[first : first + LANES]
        for j in range(LANES):
            lanes[j] += np.float64(abs(part[j]))


@compiled
def lanes_sum(lanes: Any) -> Any:
    total = lanes.copy()
    half = LANES // 2
    while half:
        for j in range(half):
            total[j] += total[j + half]
        half //= 2
    return total[0]

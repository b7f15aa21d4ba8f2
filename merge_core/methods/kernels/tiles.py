"""Compile kernels with numba, convert stored numbers to float32 tiles and back, and add up in a defined order.

numba caches compiled code on disk. It replaces files in the cache directory atomically, so several processes may
compile concurrently. If the directory is not writable, every process compiles for itself.

The first merge on a machine waits for the compiler, so kernels avoid constructs that compile slowly: assignment of
arrays to arrays (1.5 s), ``view`` of an array (0.2 s; almost nothing for a number), and ``np.zeros`` for arrays that
are fully overwritten (0.1 s). Code that only some calls need is guarded by ``is not None``, because numba omits it for
calls that pass None.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from mergegate.merge_core.methods import kernel_directory

# Elements per tile. It divides the grain, so that a tile never crosses a grain boundary.
TILE = 1024
# Number of partial sums of a long sum, so that it can be vectorized in a defined order. It divides the tile.
LANES = 256
# All bits of a float32 except the sign.
SIZE = np.uint32(0x7FFFFFFF)


def _import_array_functions() -> None:
    """Import numba's array functions, which loading a kernel needs, without ``scipy.linalg``.

    numba imports it (0.2 s, a tenth of a small merge) only to find out whether a BLAS library is available. Kernels use
    none, and mergegate requires scipy, which contains one.
    """
    linalg: Any = import_module("numba.np.linalg")
    if (check := getattr(linalg, "ensure_blas", None)) is None:
        return  # another version of numba
    linalg.ensure_blas = lambda: None
    try:
        import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = check


_import_array_functions()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` on its first call, with IEEE arithmetic, without the GIL, for one thread."""
    return _compiled(function)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` for calls from other kernels only. This takes half the time of :func:`compiled`."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiled(function: Callable[..., Any], **options: bool) -> Callable[..., Any]:
    config: Any = numba.config
    njit: Any = numba.njit  # Its annotations lack the wrappers' options.
    directory, previous_directory = kernel_directory(), config.CACHE_DIR
    if directory is not None:
        config.CACHE_DIR = directory  # Read when the decorator runs, not when the function is compiled.
    try:
        kernel: Callable[..., Any] = njit(nogil=True, cache=directory is not None, error_model="numpy", **options)(
            function
        )
    finally:
        config.CACHE_DIR = previous_directory
    return kernel


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
def read_deltas(data: Any, rows: Any, first: int, m: int, base: Any, deltas: Any) -> None:
    """Read ``m`` elements of the base from element ``first``, and compute all task vectors there."""
    widen(data, rows[0] + first, base[:m])
    for i in range(len(deltas)):
        delta = deltas[i]
        widen(data, rows[i + 1] + first, delta[:m])
        for j in range(m):
            delta[j] -= base[j]


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

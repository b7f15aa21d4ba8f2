"""Kernels that store which elements of a task vector are kept, one bit each, so that a later pass need not decide."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import inner
from mergegate.merge_core.methods.kernels.tiles import magnitude_bits


@inner
def store_mask(delta: Any, m: int, bits: Any) -> None:
    """Set the bits of the elements of ``delta[:m]`` that are not zero.

    Args:
        delta: Sparsified task vector.
        m: Number of elements.
        bits: An eighth of ``m`` bytes, rounded up. Bit ``t`` of byte ``i`` belongs to element ``t * len(bits) + i``, so
            that loops over bytes are loops over neighboring elements.
    """
    step = len(bits)
    bits[:] = np.uint8(0)
    for t in range(8):
        part = delta[t * step : min((t + 1) * step, m)]
        for i in range(len(part)):
            bits[i] |= np.uint8(magnitude_bits(part[i]) != 0) << np.uint8(t)


@inner
def apply_mask(delta: Any, m: int, bits: Any) -> None:
    """Set the elements to zero that were zero in :func:`store_mask`."""
    step = len(bits)
    for t in range(8):
        part = delta[t * step : min((t + 1) * step, m)]
        for i in range(len(part)):
            mask = np.uint32(0) - (np.uint32(bits[i]) >> np.uint32(t) & np.uint32(1))
            part[i] = np.uint32(np.float32(part[i]).view(np.uint32) & mask).view(np.float32)

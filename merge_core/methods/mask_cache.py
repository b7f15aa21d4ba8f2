"""Cache the masks that one pass over a tensor computed for the next pass, one bit per element, within a memory limit.

Computing a mask twice costs more than reading the elements twice. The cache is optional: if a block has no
mask, the mask is computed again with the same result. Therefore all tensors that are being processed share one bounded
amount of memory, and blocks that do not fit go without.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[np.uint8]

_LIMIT = 128 << 20


class _Memory:
    """Budget of bytes that is left for masks."""

    def __init__(self, limit: int) -> None:
        self._left, self._lock = limit, threading.Lock()

    def take(self, models: int, size: int) -> Bits:
        """Return an array ``[models, size]``, or ``[models, 0]`` if that exceeds the budget.

        The bytes return to the budget when the array is no longer referenced.
        """
        with self._lock:
            granted = models * size <= self._left
            self._left -= models * size if granted else 0
        bits: Bits = np.empty((models, size if granted else 0), np.uint8)
        if granted:
            weakref.finalize(bits, self._give, models * size)
        return bits

    def _give(self, size: int) -> None:
        with self._lock:
            self._left += size


_memory = _Memory(_LIMIT)


class MaskCache:
    """Cached masks of one tensor's blocks."""

    def __init__(self, models: int) -> None:
        self._models = models
        self._of: dict[int, Bits] = {}

    def begin(self, start: int, length: int, tile: int) -> Bits:
        """Return memory for the mask of a block; empty if the budget is used up.

        Args:
            start: First element of the block.
            length: Number of elements of the block.
            tile: Number of elements that the kernel masks at a time.
        """
        bits = _memory.take(self._models, -(-length // tile) * (-(-tile // 8)))
        if bits.size:
            self._of[start] = bits
        return bits

    def take(self, start: int) -> Bits:
        """Remove and return the mask of the block at ``start``; empty if there is none."""
        return self._of.pop(start, self.none)

    @property
    def none(self) -> Bits:
        """Empty mask."""
        return np.empty((self._models, 0), np.uint8)

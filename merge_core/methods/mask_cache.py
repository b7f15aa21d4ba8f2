"""What one pass over a tensor has found to be kept, for the next pass: a bit for each element, as far as memory goes.

Deciding twice which elements a method keeps costs more than reading them twice. What is noted is never needed: a block
without a note is decided again, with the same outcome. So all tensors in work share one bounded amount of memory, and
blocks that find none of it left go without.
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
    """Bytes that may still be taken."""

    def __init__(self, limit: int) -> None:
        self._left, self._lock = limit, threading.Lock()

    def take(self, models: int, size: int) -> Bits:
        """``[models, size]``, given back when nobody has it any more; ``[models, 0]`` if that is more than is left."""
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
    """The notes on one tensor's blocks."""

    def __init__(self, models: int) -> None:
        self._models = models
        self._of: dict[int, Bits] = {}

    def begin(self, start: int, length: int, tile: int) -> Bits:
        """Room for a note on the block at ``start``; empty when there is none.

        Args:
            start: Its first element.
            length: Its elements.
            tile: Of how many each the kernel makes notes.
        """
        bits = _memory.take(self._models, -(-length // tile) * (-(-tile // 8)))
        if bits.size:
            self._of[start] = bits
        return bits

    def take(self, start: int) -> Bits:
        """The note on the block at ``start``, once; empty when there is none."""
        return self._of.pop(start, self.none)

    @property
    def none(self) -> Bits:
        """No note."""
        return np.empty((self._models, 0), np.uint8)

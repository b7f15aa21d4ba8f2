"""Generate random masks that depend only on (seed, tensor name, model index, element index), and cache masks.

Philox2x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
https://doi.org/10.1145/2063384.2063405) is a counter-based generator: it computes the number for an element from the
element's index, without state. So a mask is the same on every device, for any block size, on any number of threads and
after a resume.

The 64-bit key of a tensor fills the generator's 32-bit key and the upper word of its counter; the lower word counts
pairs of elements. That covers tensors of up to 2**33 elements.

:class:`MaskCache` stores the masks that one pass over a tensor computed for the next pass, one bit per element, because
computing a mask twice costs more than reading the elements twice. The cache is optional: if a block has no mask, the
mask is computed again with the same result. So all tensors share one bounded amount of memory, and blocks that do not
fit have no cached mask.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Bits = NDArray[np.uint8]

MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
ROUNDS = 10
_WORD = 0xFFFFFFFF
# Limit of the memory for cached masks, in bytes.
_CACHE_BYTES = 128 << 20


def mask_key(seed: int, tensor: str, model: int) -> tuple[int, int]:
    """Return the generator's key for a tensor of the ``model``-th model: two 32-bit words."""
    digest = hashlib.sha256(f"{seed}\0{tensor}\0{model}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def threshold(probability: float) -> int:
    """Return the limit below which a random word is with ``probability``, in units of 2**-32."""
    return round(min(max(probability, 0.0), 1.0) * 2**32)


def mask_words(key: tuple[int, int], start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return ``[count]`` uniform 32-bit words (int64) for the elements from index ``start``."""
    import torch

    first = start // 2
    pairs = torch.arange(first, (start + count + 1) // 2, dtype=torch.int64, device=device)
    low, high = philox(pairs & _WORD, torch.full_like(pairs, key[1]), key[0])
    return torch.stack((low, high), dim=1).flatten()[start - 2 * first :][:count]


def philox(low: torch.Tensor, high: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Philox2x32-10 of the counters ``(low, high)``: int64 tensors that hold 32-bit words."""
    for round_number in range(ROUNDS):
        product = low * MULTIPLIER  # May wrap around as a signed number, but its 64 bits are right.
        low = ((product >> 32) & _WORD) ^ high ^ ((key + round_number * WEYL) & _WORD)
        high = product & _WORD
    return low, high


class MaskCache:
    """Cached masks of one tensor's blocks."""

    _lock = threading.Lock()
    _free_bytes = _CACHE_BYTES  # Shared by all caches.

    def __init__(self, models: int) -> None:
        self._empty = np.empty((models, 0), np.uint8)
        self._masks: dict[int, Bits] = {}

    def begin(self, start: int, length: int, tile: int) -> Bits:
        """Return memory for the mask of a block; empty if the budget is used up.

        The bytes return to the budget when the array is no longer referenced.

        Args:
            start: First element of the block.
            length: Number of elements of the block.
            tile: Number of elements that the kernel masks at a time.
        """
        shape = (len(self._empty), -(-length // tile) * (-(-tile // 8)))
        size = shape[0] * shape[1]
        with MaskCache._lock:
            if size > MaskCache._free_bytes:
                return self._empty
            MaskCache._free_bytes -= size
        mask: Bits = np.empty(shape, np.uint8)
        weakref.finalize(mask, MaskCache._release, size)
        if size:
            self._masks[start] = mask
        return mask

    def take(self, start: int) -> Bits:
        """Remove and return the mask of the block at ``start``; empty if there is none."""
        return self._masks.pop(start, self._empty)

    @staticmethod
    def _release(size: int) -> None:
        with MaskCache._lock:
            MaskCache._free_bytes += size

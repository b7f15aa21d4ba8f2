"""Generate random masks, and cache them from one pass over a tensor to the next.

They depend only on seed, tensor name, model index and element index. Philox2x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3", https://doi.org/10.1145/2063384.2063405) computes the random number of an
element from its index, without state. So a mask does not depend on the device, the block size or the number of threads,
and it is the same after a resume. The 64-bit key of a tensor fills the generator's 32-bit key and the upper word of its
counter. The lower word counts pairs of elements, which is enough for tensors of 2**33 elements.
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

# Constants of Philox.
MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
ROUNDS = 10
_WORD = 0xFFFFFFFF
# Limit of the memory for cached masks, in bytes.
_CACHE_BYTES = 128 << 20


def mask_key(seed: int, tensor: str, model: int) -> tuple[int, int]:
    """Return the key for a tensor of the model with index ``model``: two 32-bit words."""
    digest = hashlib.sha256(f"{seed}\0{tensor}\0{model}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def threshold(probability: float) -> int:
    """Return the limit such that a random 32-bit word is below it with the given probability."""
    return round(min(max(probability, 0.0), 1.0) * 2**32)


def mask_words(key: tuple[int, int], start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return uniform random 32-bit words for ``count`` elements from index ``start``: int64 ``[count]``."""
    import torch

    first = start // 2
    pairs = torch.arange(first, (start + count + 1) // 2, dtype=torch.int64, device=device)
    low, high = philox(pairs & _WORD, torch.full_like(pairs, key[1]), key[0])
    return torch.stack((low, high), dim=1).flatten()[start - 2 * first :][:count]


def philox(low: torch.Tensor, high: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply Philox2x32-10 to the counters ``(low, high)``. All tensors are int64 and hold 32-bit words."""
    for round_number in range(ROUNDS):
        product = low * MULTIPLIER  # May wrap around as a signed number, but its 64 bits are right.
        low = ((product >> 32) & _WORD) ^ high ^ ((key + round_number * WEYL) & _WORD)
        high = product & _WORD
    return low, high


class MaskCache:
    """Cached masks for the blocks of one tensor, from one pass over the tensor to the next.

    Computing a mask costs more than reading the elements. All tensors share a fixed amount of memory. A mask that does
    not fit is computed again, with the same result.
    """

    _lock = threading.Lock()
    _free_bytes = _CACHE_BYTES  # Shared by all caches.

    def __init__(self, models: int) -> None:
        self._empty = np.empty((models, 0), np.uint8)
        self._masks: dict[int, Bits] = {}

    def begin(self, start: int, length: int, tile: int) -> Bits:
        """Return memory for the mask of a block, or an empty array if the shared memory is used up.

        The memory becomes available again when the array is no longer referenced. ``start`` is the index of the block's
        first element, ``length`` its number of elements, and ``tile`` the number that the kernel processes at a time.
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
        """Remove and return the mask of the block at ``start``. Return an empty array if it is not cached."""
        return self._masks.pop(start, self._empty)

    @staticmethod
    def _release(size: int) -> None:
        with MaskCache._lock:
            MaskCache._free_bytes += size

"""What was kept of a task vector, one bit for each element, so that a later pass need not decide it again."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import inner
from mergegate.merge_core.methods.kernels.tiles import magnitude_bits


@inner
def note_kept(delta: Any, m: int, bits: Any) -> None:
    """Which of ``delta[:m]`` are not zero.

    Args:
        bits: An eighth of ``m``, rounded up: bit ``t`` of byte ``i`` is of element ``t * len(bits) + i``, so that
            loops over bytes are loops over neighbours.
    """
    step = len(bits)
    bits[:] = np.uint8(0)
    for t in range(8):
        here = delta[t * step : min((t + 1) * step, m)]
        for i in range(len(here)):
            bits[i] |= np.uint8(magnitude_bits(here[i]) != 0) << np.uint8(t)


@inner
def drop_again(delta: Any, m: int, bits: Any) -> None:
    """Set elements to zero that :func:`note_kept` saw as zeros."""
    step = len(bits)
    for t in range(8):
        here = delta[t * step : min((t + 1) * step, m)]
        for i in range(len(here)):
            mask = np.uint32(0) - (np.uint32(bits[i]) >> np.uint32(t) & np.uint32(1))
            here[i] = np.uint32(np.float32(here[i]).view(np.uint32) & mask).view(np.float32)

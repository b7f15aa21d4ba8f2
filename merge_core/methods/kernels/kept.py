"""What was kept of a task vector, one bit for each element, so that a later pass need not decide it again."""

from __future__ import annotations

from typing import Any

import numpy as np

from merge_core.methods.kernels.compiled import compiled
from merge_core.methods.kernels.tiles import SIZE


@compiled
def note_kept(delta: Any, m: int, bits: Any) -> None:
    """Which of ``delta[:m]`` are not zero.

    Args:
        bits: An eighth of ``m``, rounded up: bit ``t`` of byte ``i`` is of element ``t * len(bits) + i``, so that
            loops over bytes are loops over neighbours.
    """
    patterns, step = delta.view(np.uint32), len(bits)
    bits[:] = np.uint8(0)
    for t in range(8):
        here = patterns[t * step : min((t + 1) * step, m)]
        for i in range(len(here)):
            bits[i] |= np.uint8((here[i] & SIZE) != 0) << np.uint8(t)


@compiled
def drop_again(delta: Any, m: int, bits: Any) -> None:
    """Set elements to zero that :func:`note_kept` saw as zeros."""
    patterns, step = delta.view(np.uint32), len(bits)
    for t in range(8):
        here = patterns[t * step : min((t + 1) * step, m)]
        for i in range(len(here)):
            here[i] &= np.uint32(0) - (np.uint32(bits[i]) >> np.uint32(t) & np.uint32(1))

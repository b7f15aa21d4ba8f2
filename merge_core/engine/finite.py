"""What a merge reads must be finite: one rule for every method, counted in the pass that reads a tensor first.

Methods cannot be trusted to pass a NaN on: a comparison with it is false, so a vote, a threshold or a mask may drop it,
and the output looks healthy while a parent is broken. Therefore inputs are looked at, not outputs: all that is read of
a tensor is counted while it is in memory anyway, and when its first pass is over, a count above zero refuses the merge.
Until then no journal says that the tensor is done, so a merge that is resumed reads it, and refuses, again.

Rows that the result has no place for are not read, and not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from merge_core.checkpoint import EXPONENTS, DType, patterns
from merge_core.errors import InvalidInput
from merge_core.plan import TensorJob, step_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Without compiled kernels: so many elements at a time, so that what is compared stays in the cache.
_TILE = 1 << 15


def count_non_finite(stored: NDArray[np.uint8], dtype: DType, *, fused: bool) -> int:
    """Number of NaN and infinite elements among numbers as they are stored; 0 for formats that have none.

    Args:
        stored: Their bytes.
        dtype: Their format.
        fused: Whether compiled kernels are used.
    """
    if dtype.code not in EXPONENTS:
        return 0
    bits, exponent = patterns(stored, dtype), EXPONENTS[dtype.code]
    if fused:
        from merge_core.methods import kernels

        return int(kernels.count_non_finite(bits, int(exponent)))
    tiles = (bits[first : first + _TILE] for first in range(0, len(bits), _TILE))
    return sum(int(np.count_nonzero((tile & exponent) == exponent)) for tile in tiles)


def require_finite(job: TensorJob, counts: Sequence[int] | NDArray[Any]) -> None:
    """Raise InvalidInput if any input of ``job`` has elements that are NaN or infinite.

    Args:
        job: The tensor.
        counts: Of each input, how many of the elements that are read.
    """
    broken = [(item, int(count)) for item, count in zip(job.inputs, counts, strict=True) if count]
    if not broken:
        return
    (item, count), *others = broken
    more = "".join(f"; in {other.model}, {number}" for other, number in others)
    made_here = step_of(item.tensor.file) is not None
    raise InvalidInput(
        f"{item.model}: {item.tensor.name}",
        found=f"{count} of {item.tensor.numel} numbers are NaN or infinite{more}",
        expected="finite numbers in everything that is merged",
        remedy="check the range of this step's dtype, and its parameters"
        if made_here
        else "get the checkpoint again or save it again from a sound one; or leave it out of the recipe",
    )

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

from mergegate.merge_core.checkpoint import EXPONENTS, DType, ExpectedImportance, patterns
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.plan import TensorJob, step_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

# What is read, and then looked at, in one go: half of a core's second-level cache. Smaller reads cost more than they
# save.
PIECE_BYTES = 1 << 20
# Without compiled kernels so many words are compared at a time, which stay in the cache.
_TILE_WORDS = 1 << 12


def look_through(stored: Bytes, dtype: DType, *, fused: bool) -> tuple[int, bool]:
    """Number of NaN and infinite elements among numbers as they are stored; and whether any is not zero.

    All that is looked at is a few bits of each: the numbers are counted only where there is something to count.

    Args:
        stored: Their bytes, aligned to 8.
        dtype: Their format, one that is merged.
        fused: Whether compiled kernels are used.
    """
    exponent = EXPONENTS[dtype.code]
    whole = len(stored) // 8 * 8
    carried, seen = _common(stored[:whole].view(np.uint64), dtype, fused)
    if whole < len(stored):
        last = np.zeros(8, np.uint8)  # Zeros are finite.
        last[: len(stored) - whole] = stored[whole:]
        more = _common(last.view(np.uint64), dtype, fused=False)
        carried, seen = carried | more[0], seen | more[1]
    signs = _repeated(_sign(exponent), exponent.itemsize)
    count = 0
    if carried & signs:
        count = int(np.count_nonzero((patterns(stored, dtype) & exponent) == exponent))
    return count, bool(seen & ~signs)


def count_non_finite(stored: Bytes, dtype: DType, *, fused: bool) -> int:
    """The first of what :func:`look_through` says; 0 of integers."""
    return look_through(stored, dtype, fused=fused)[0] if dtype.code in EXPONENTS else 0


def _common(words: NDArray[np.uint64], dtype: DType, fused: bool) -> tuple[int, int]:
    """See ``kernels.inspect``, of which this is the readable reference."""
    exponent = EXPONENTS[dtype.code]
    mask = np.uint64(_repeated(int(exponent), exponent.itemsize))
    low = np.uint64(_repeated(int(exponent) & -int(exponent), exponent.itemsize))
    if fused:
        from mergegate.merge_core.methods import kernels

        carried, seen = kernels.inspect(words, mask, low)
        return int(carried), int(seen)
    carried = seen = 0
    for first in range(0, len(words), _TILE_WORDS):
        tile = words[first : first + _TILE_WORDS]
        carried |= int(np.bitwise_or.reduce((tile & mask) + low))
        seen |= int(np.bitwise_or.reduce(tile))
    return carried, seen


def _sign(exponent: np.unsignedinteger[Any]) -> int:
    return 1 << (8 * exponent.itemsize - 1)


def _repeated(bits: int, size: int) -> int:
    """A pattern of ``size`` bytes, side by side in 64 bits."""
    return sum(bits << shift for shift in range(0, 64, 8 * size))


def require_finite(job: TensorJob, counts: Sequence[int] | NDArray[Any]) -> None:
    """Raise InvalidInput if any input of ``job``, or what is read beside it, has elements that are NaN or infinite.

    Args:
        job: The tensor.
        counts: Of each input, then of each importance, how many of the elements that are read.
    """
    inputs = len(job.inputs)
    for measured, count in zip(job.importance, counts[inputs:], strict=True):
        if count and not isinstance(measured, ExpectedImportance):
            raise InvalidInput(
                f"{measured.parts[0].file}: {measured.parts[0].name}",
                found=f"{int(count)} numbers that are NaN or infinite",
                expected="the importance of elements as mergegate measures it",
                remedy="run again",
            )
    broken = [(item, int(count)) for item, count in zip(job.inputs, counts[:inputs], strict=True) if count]
    if not broken:
        return
    (item, count), *others = broken
    more = "".join(f"; in {other.model}, {number}" for other, number in others)
    made_here = any(step_of(part.file) is not None for part in item.tensor.parts)
    raise InvalidInput(
        f"{item.model}: {item.tensor.name}",
        found=f"{count} of {item.tensor.numel} numbers are NaN or infinite{more}",
        expected="finite numbers in everything that is merged",
        remedy="check the range of this step's dtype, and its parameters"
        if made_here
        else "get the checkpoint again or save it again from a sound one; or leave it out of the recipe",
    )

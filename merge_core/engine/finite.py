"""Require that all inputs of a merge are finite, with one rule for all methods and no extra pass.

Methods do not reliably propagate NaN. A comparison with NaN is false, so a vote, a threshold or a mask may drop it, and
the output looks healthy although a parent is broken. Therefore the inputs are checked, not the outputs. Non-finite
elements are counted while a tensor is in memory anyway, and a count above zero after the first pass refuses the merge.
No journal records the tensor as finished before that, so a resumed merge reads it again and refuses again.

Rows that the result does not have are neither read nor checked.
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

# Bytes that are read and then inspected together: half of a core's second-level cache. Smaller reads cost more than
# they save.
PIECE_BYTES = 1 << 20
# Words that are compared at a time without compiled kernels, so that they stay in the cache.
_TILE_WORDS = 1 << 12


def inspect_numbers(stored_bytes: Bytes, dtype: DType, *, fused: bool) -> tuple[int, bool]:
    """Return the number of NaN and infinite elements, and whether any element is not zero.

    The check inspects only a few bits of each number. It counts elements only if there is something to count.

    Args:
        stored_bytes: Bytes of the stored numbers, aligned to 8 bytes.
        dtype: Format of the numbers; a format that merges support.
        fused: Whether to use compiled kernels.
    """
    exponent = EXPONENTS[dtype.code]
    aligned_size = len(stored_bytes) // 8 * 8
    carried, nonzero_bits = _combine_bits(stored_bytes[:aligned_size].view(np.uint64), dtype, fused)
    if aligned_size < len(stored_bytes):
        tail = np.zeros(8, np.uint8)  # Padding with zeros is safe because they are finite.
        tail[: len(stored_bytes) - aligned_size] = stored_bytes[aligned_size:]
        tail_bits = _combine_bits(tail.view(np.uint64), dtype, fused=False)
        carried, nonzero_bits = carried | tail_bits[0], nonzero_bits | tail_bits[1]
    signs = _repeat(1 << (8 * exponent.itemsize - 1), exponent.itemsize)
    count = 0
    if carried & signs:
        count = int(np.count_nonzero((patterns(stored_bytes, dtype) & exponent) == exponent))
    return count, bool(nonzero_bits & ~signs)


def count_non_finite(stored_bytes: Bytes, dtype: DType, *, fused: bool) -> int:
    """Return the number of NaN and infinite elements; 0 for integers. See :func:`inspect_numbers`."""
    return inspect_numbers(stored_bytes, dtype, fused=fused)[0] if dtype.code in EXPONENTS else 0


def _combine_bits(words: NDArray[np.uint64], dtype: DType, fused: bool) -> tuple[int, int]:
    """Return the combined exponent carries and the combined bits of all words.

    This is the readable reference of ``kernels.inspect``.
    """
    exponent = EXPONENTS[dtype.code]
    mask = np.uint64(_repeat(int(exponent), exponent.itemsize))
    low = np.uint64(_repeat(int(exponent) & -int(exponent), exponent.itemsize))
    if fused:
        from mergegate.merge_core.methods import kernels

        carried, nonzero_bits = kernels.inspect(words, mask, low)
        return int(carried), int(nonzero_bits)
    carried = nonzero_bits = 0
    for first in range(0, len(words), _TILE_WORDS):
        tile = words[first : first + _TILE_WORDS]
        carried |= int(np.bitwise_or.reduce((tile & mask) + low))
        nonzero_bits |= int(np.bitwise_or.reduce(tile))
    return carried, nonzero_bits


def _repeat(bits: int, size: int) -> int:
    """Return a pattern of ``size`` bytes, repeated to fill 64 bits."""
    return sum(bits << shift for shift in range(0, 64, 8 * size))


def require_finite(job: TensorJob, counts: Sequence[int] | NDArray[Any]) -> None:
    """Raise InvalidInput if an input of ``job``, or the importance of its elements, has NaN or infinity.

    Args:
        job: Job of one tensor.
        counts: Number of non-finite elements of each input, then of each importance. Only elements that are read count.
    """
    inputs = len(job.inputs)
    for measured, count in zip(job.importance, counts[inputs:], strict=True):
        if count and not isinstance(measured, ExpectedImportance):
            raise InvalidInput(
                f"{measured.parts[0].file}: {measured.parts[0].name}",
                found=f"{int(count)} NaN or infinite numbers",
                expected="finite importance of elements",
                remedy="measure it again",
            )
    affected = [(item, int(count)) for item, count in zip(job.inputs, counts[:inputs], strict=True) if count]
    if not affected:
        return
    (item, count), *other_inputs = affected
    also = "".join(f"; in {other_input.model}, {number}" for other_input, number in other_inputs)
    is_step_result = any(step_of(part.file) is not None for part in item.tensor.parts)
    raise InvalidInput(
        f"{item.model}: {item.tensor.name}",
        found=f"{count} of {item.tensor.numel} numbers are NaN or infinite{also}",
        expected="finite numbers in all inputs",
        remedy="check the range of this step's dtype, and its parameters"
        if is_step_result
        else "get the checkpoint again, save it again from an intact one, or remove it from the recipe",
    )

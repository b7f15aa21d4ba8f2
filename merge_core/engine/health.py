"""Check that all inputs of a merge are finite, and report output tensors that no healthy model has.

Statistics of each output tensor are collected while it is written.

Checking the output is not enough. A comparison with NaN is false, so a vote, a threshold or a mask may drop a NaN, and
the output looks healthy although a parent is broken. Therefore the first pass over a tensor counts the non-finite
elements of its inputs. If there are any, the merge is refused before the journal records the tensor, so a resumed merge
reads the tensor again and refuses again. Rows that the output does not need are neither read nor checked.

An infinite element with the same sign in all inputs is a constant of the network, such as the clip bound of an audio
tower, and not damage. Methods compute with zero in its place, and the output gets the infinity. If only one model
provides a tensor, its infinities are constants only if the tensor has no other elements, because there is no second
model to compare it with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint import EXPONENTS, DType, ExpectedImportance, patterns
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.plan import TensorJob, step_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


# Merging related models does not change the root mean square by more than this factor relative to all parents.
_SIZE_RATIO = 4.0
# Large tensors are sampled: this many elements at the start of each period. A thousand elements are enough to estimate
# a root mean square. ``_PERIODS`` has tensor sizes and the periods above them.
_SAMPLE_RUN = 256
_PERIODS = ((1 << 18, 64 * _SAMPLE_RUN), (1 << 13, 8 * _SAMPLE_RUN))


@dataclass(frozen=True)
class TensorHealth:
    """Statistics of one output tensor.

    Args:
        name: Tensor name.
        non_finite: Number of NaN and infinite elements.
        zero: Whether every element is zero.
        rms: Root mean square of the elements, estimated from a sample for large tensors.
        parents: Root mean square of each input, from the same positions.
    """

    name: str
    non_finite: int
    zero: bool
    rms: float = 0.0
    parents: tuple[float, ...] = ()

    def entry(self) -> dict[str, Any]:
        return {
            "tensor": self.name,
            "non_finite": self.non_finite,
            "zero": self.zero,
            "rms": self.rms,
            "parents": list(self.parents),
        }


def sample_elements(values: NDArray[Any], start: int, numel: int) -> NDArray[Any]:
    """Return a sample of ``values``, which are the elements from index ``start`` in a tensor of ``numel`` elements."""
    period = next((period for size, period in _PERIODS if numel > size), 0)
    if not period:
        return values
    periods = values[-start % period :]
    return periods[: len(periods) // period * period].reshape(-1, period)[:, :_SAMPLE_RUN]


def judge_health(tensors: Sequence[TensorHealth], *, may_zero: bool = False) -> tuple[Finding, ...]:
    """Return findings about output tensors.

    NaN and infinity block the merge. So does a tensor of zeros if none of its parents is zero, unless ``may_zero``.

    Args:
        tensors: Statistics of the tensors.
        may_zero: Whether the method may scale a tensor to zero.
    """
    return tuple(finding for tensor in tensors for finding in _judge(tensor, may_zero))


def _judge(tensor: TensorHealth, may_zero: bool) -> Iterator[Finding]:
    if tensor.non_finite:
        yield Finding(
            "block",
            tensor.name,
            found=f"{tensor.non_finite} elements are NaN or infinite",
            expected="finite numbers",
            remedy="check the parents for NaN, and the range of the output dtype",
        )
        return
    low, high = min(tensor.parents, default=0.0), max(tensor.parents, default=0.0)
    if tensor.zero and (high > 0 or not tensor.parents):
        yield Finding(
            "block" if low > 0 and not may_zero else "warn",
            tensor.name,
            found="every element is zero",
            expected="nonzero weights" if low > 0 else "nonzero weights, as in some of its parents",
            remedy="compare with the parents, and check weights and densities",
        )
    elif not tensor.zero and high > 0 and (tensor.rms > _SIZE_RATIO * high or tensor.rms * _SIZE_RATIO < low):
        yield Finding(
            "warn",
            tensor.name,
            found=f"elements with a root mean square of {tensor.rms:.2g}",
            expected=f"about as large as in its parents: {low:.2g}" + (f" to {high:.2g}" if high > low else ""),
            remedy="check weights, scales and lambda",
        )


# Number of bytes to read and then inspect while they are in the second-level cache of a core, about half of which they
# fill. Smaller pieces would cost more time for reading than they save.
PIECE_BYTES = 1 << 20
# Number of 64-bit words that NumPy inspects at a time, so that they stay in the cache.
_TILE_WORDS = 1 << 12


def inspect_numbers(stored_bytes: Bytes, dtype: DType, *, fused: bool) -> tuple[int, bool]:
    """Return the number of NaN and infinite elements, and whether any element is not zero.

    Args:
        stored_bytes: Bytes of the stored numbers, aligned to 8 bytes.
        dtype: Floating-point format of the numbers.
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
    """Return the number of NaN and infinite elements (see :func:`inspect_numbers`), or 0 for integers."""
    return inspect_numbers(stored_bytes, dtype, fused=fused)[0] if dtype.code in EXPONENTS else 0


def count_infinite(stored_bytes: Bytes, dtype: DType) -> int:
    """Return the number of infinite elements, or 0 for integers."""
    if dtype.code not in EXPONENTS:
        return 0
    return int(np.count_nonzero(_infinity_signs(stored_bytes, dtype)))


def take_constants(rows: Sequence[Bytes], dtypes: Sequence[DType]) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
    """Set the elements that are the same infinity in all ``rows`` to zero, and return their indices and signs.

    Args:
        rows: Bytes of the same elements in each input of a tensor. A single row has constants only if all of its
            elements are infinite.
        dtypes: Floating-point format of each row.
    """
    signs, *others = (_infinity_signs(row, dtype) for row, dtype in zip(rows, dtypes, strict=True))
    for other in others:
        signs = np.where(signs == other, signs, 0)
    indices = np.flatnonzero(signs)
    if not others and len(indices) < len(signs):
        indices = indices[:0]
    for row, dtype in zip(rows, dtypes, strict=True):
        patterns(row, dtype)[indices] = 0
    return indices, signs[indices]


def put_constants(stored_bytes: Bytes, dtype: DType, constants: tuple[NDArray[np.intp], NDArray[np.int8]]) -> None:
    """Write infinities that :func:`take_constants` returned into an output block of the floating-point ``dtype``."""
    indices, signs = constants
    exponent = EXPONENTS[dtype.code]
    sign_bit = exponent.dtype.type(1 << (8 * exponent.itemsize - 1))
    patterns(stored_bytes, dtype)[indices] = np.where(signs < 0, exponent | sign_bit, exponent)


def _infinity_signs(stored_bytes: Bytes, dtype: DType) -> NDArray[np.int8]:
    """Return 1 or -1 for each infinite element, and 0 for all others."""
    exponent, bits = EXPONENTS[dtype.code], patterns(stored_bytes, dtype)
    sign_bit = exponent.dtype.type(1 << (8 * exponent.itemsize - 1))
    signs: NDArray[np.int8] = (bits == exponent).astype(np.int8) - (bits == (exponent | sign_bit)).astype(np.int8)
    return signs


def _combine_bits(words: NDArray[np.uint64], dtype: DType, fused: bool) -> tuple[int, int]:
    """Combine the bits of all words as ``kernels.inspect`` does. This is the readable reference for that kernel."""
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

    ``counts`` are the numbers of non-finite elements that were read from each input, then from each importance tensor.
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

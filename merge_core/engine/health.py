"""Collect statistics of each output tensor while it is written, and report tensors that no healthy model has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.errors import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        """Return the statistics as the content of a journal line."""
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

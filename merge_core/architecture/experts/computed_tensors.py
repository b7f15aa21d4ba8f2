"""Define tensors that no file contains: constants, such as computed router rows, and tensors with reordered rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.checkpoint import BY_CODE, AnyTensor, DerivedTensor, ReadElements, ReadStored, StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class ConstantTensor(DerivedTensor):
    """Float32 tensor of the little-endian ``values``, or of zeros if ``values`` is None."""

    values: bytes | None = field(default=None, repr=False)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return ()

    def identity(self) -> Any:
        return hashlib.sha256(self.values).hexdigest() if self.values is not None else None

    def open(self, read: ReadStored) -> ReadElements:
        import numpy as np

        stored = np.frombuffer(self.values, np.uint8) if self.values is not None else None

        def elements(first: int, into: NDArray[np.uint8]) -> None:
            start = 4 * first
            into[:] = 0 if stored is None else stored[start : start + len(into)]

        return elements


def constant_tensor(name: str, shape: tuple[int, ...], values: bytes | None = None) -> ConstantTensor:
    """Return a float32 tensor of the little-endian ``values``. Default: zeros."""
    return ConstantTensor(name, BY_CODE["F32"], shape, values)


@dataclass(frozen=True)
class RowPermutation(DerivedTensor):
    """Tensor whose row ``i`` is row ``rows[i]`` of the tensor ``whole``."""

    whole: AnyTensor
    rows: tuple[int, ...]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.whole.parts

    def identity(self) -> Any:
        inner = self.whole.identity() if isinstance(self.whole, DerivedTensor) else None
        return [list(self.rows), inner]

    def open(self, read: ReadStored) -> ReadElements:
        whole, size, width = self.whole, self.dtype.size, self.numel // len(self.rows)
        inner: ReadElements = whole.open(read) if isinstance(whole, DerivedTensor) else partial(read, whole)

        def elements(first: int, into: NDArray[np.uint8]) -> None:
            position, count = 0, len(into) // size
            while position < count:
                row, column = divmod(first + position, width)
                run = min(width - column, count - position)
                inner(self.rows[row] * width + column, into[position * size : (position + run) * size])
                position += run

        return elements


def permuted_rows(tensor: AnyTensor, rows: Sequence[int]) -> RowPermutation:
    """Return a tensor whose row ``i`` is row ``rows[i]`` of ``tensor``."""
    return RowPermutation(tensor.name, tensor.dtype, tensor.shape, tensor, tuple(rows))

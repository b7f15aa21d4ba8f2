"""Reorder the rows of a tensor, such as the router of a mixture whose experts are renumbered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.checkpoint import AnyTensor, DerivedTensor, ReadElements, ReadStored, StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class RowPermutation(DerivedTensor):
    """Tensor whose row ``i`` is row ``rows[i]`` of the tensor ``whole``.

    Args:
        whole: Original tensor.
        rows: Row numbers in the original tensor.
    """

    whole: AnyTensor
    rows: tuple[int, ...]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.whole.parts

    def identity(self) -> Any:
        inner = self.whole.identity() if isinstance(self.whole, DerivedTensor) else None
        return [list(self.rows), inner]

    def open(self, read: ReadStored) -> ReadElements:
        whole = self.whole
        size, width = self.dtype.size, self.numel // len(self.rows)
        inner: ReadElements
        if isinstance(whole, DerivedTensor):
            inner = whole.open(read)
        else:
            stored = whole

            def inner(first: int, into: NDArray[np.uint8]) -> None:
                read(stored, first, into)

        def elements(first: int, into: NDArray[np.uint8]) -> None:
            done, count = 0, len(into) // size
            while done < count:
                row, column = divmod(first + done, width)
                run = min(width - column, count - done)
                inner(self.rows[row] * width + column, into[done * size : (done + run) * size])
                done += run

        return elements


def permuted_rows(tensor: AnyTensor, rows: Sequence[int]) -> RowPermutation:
    """Return ``tensor`` with its rows in the order ``rows``."""
    return RowPermutation(tensor.name, tensor.dtype, tensor.shape, tensor, tuple(rows))

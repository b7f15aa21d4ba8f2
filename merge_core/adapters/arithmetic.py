"""The arithmetic of adapters on pieces of a tensor, with the roundings of PEFT: torch inside, imported when it is used.

A product of two factors is computed in tiles of whole rows on a fixed grid, so an element does not depend on which
block it is read in. A tile is never of so few rows that a matrix product becomes a matrix-vector product, which sums in
another order: so each tile has the same bits as the whole product would have there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint import AnyTensor, DerivedTensor, ReadElements, ReadStored, StoredTensor, patterns

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.checkpoint import DType

# A tile stays in the cache of a core, and is worth the calls that it takes; it has at least so many rows, also the
# last one.
_TILE_ELEMENTS = 1 << 18
_FEWEST_ROWS = 16
_REMEMBERED_BYTES = 64 << 20
# From here on the compiled addition is worth loading; below it torch's own says the same.
_COMPILED_FROM_ELEMENTS = 1 << 20
_scratch = threading.local()


def elements_of(tensor: AnyTensor, read: ReadStored) -> ReadElements:
    """How to read elements of a tensor, stored or derived itself."""
    if isinstance(tensor, DerivedTensor):
        return tensor.open(read)
    return lambda first, into: read(tensor, first, into)


def read_whole(tensor: AnyTensor, elements: ReadElements, first: int = 0, count: int | None = None) -> torch.Tensor:
    """``count`` elements of a tensor from ``first`` on, one-dimensional, in its own format."""
    into = np.empty((tensor.numel - first if count is None else count) * tensor.dtype.size, np.uint8)
    elements(first, into)
    return as_torch(into, tensor.dtype)


def read_factor(tensor: StoredTensor, read: ReadStored, high: torch.dtype) -> torch.Tensor:
    """A whole factor as a matrix of format ``high``."""
    return read_whole(tensor, lambda first, into: read(tensor, first, into)).view(tensor.shape).to(high)


def as_torch(stored: Any, dtype: DType) -> torch.Tensor:
    """Stored bytes as a one-dimensional tensor over the same memory."""
    import torch

    return torch.from_numpy(stored).view(getattr(torch, dtype.torch_name))


def high_format(dtype: DType) -> torch.dtype:
    """The format that is computed in: float64 for weights of float64, else float32."""
    import torch

    return torch.float64 if dtype.code == "F64" else torch.float32


def scratch(use: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Memory of this thread for ``count`` numbers, until the next call for the same use gives it again."""
    import torch

    held: dict[tuple[str, torch.dtype], torch.Tensor] = _scratch.__dict__.setdefault("held", {})
    if (use, dtype) not in held or len(held[use, dtype]) < count:
        held[use, dtype] = torch.empty(count, dtype=dtype)
    return held[use, dtype][:count]


@dataclass(frozen=True)
class Grid:
    """Tiles of whole rows of a tensor that consists of ``units`` matrices, one after the other.

    Args:
        units: Number of matrices.
        rows: Of each.
        width: Elements of a row.
    """

    units: int
    rows: int
    width: int

    def tiles(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(unit, first row, end row) of every tile with elements between ``first`` and ``end``."""
        step = max(_FEWEST_ROWS, _TILE_ELEMENTS // max(self.width, 1) // _FEWEST_ROWS * _FEWEST_ROWS)
        count = max(1, self.rows // step)
        # What remains after whole tiles is a tile of its own where that has enough rows.
        if self.rows > count * step and self.rows - count * step >= _FEWEST_ROWS:
            count += 1
        at = first
        while at < end:
            unit, row = divmod(at // self.width, self.rows)
            number = min(row // step, count - 1)
            last = self.rows if number == count - 1 else (number + 1) * step
            yield unit, number * step, last
            at = (unit * self.rows + last) * self.width


@dataclass(frozen=True)
class Product:
    """The change of a weight: ``scale · (left @ right)`` of each unit, or its transposed.

    Args:
        left: ``[units, out, rank]``.
        right: ``[units, rank, in]``.
        scale: As PEFT scales it.
        transposed: Whether the weight is stored as ``[in, out]``.
        first_row: Of the weight's first row in the product, where the weight is a part of it.
    """

    left: torch.Tensor
    right: torch.Tensor
    scale: float
    transposed: bool = False
    first_row: int = 0

    def rows(self, unit: int, first: int, end: int) -> torch.Tensor:
        """Rows ``first`` to ``end`` of the change of one unit, ``[end - first, width]``, until the next call."""
        import torch

        first, end = first + self.first_row, end + self.first_row
        left, right = self.left[unit], self.right[unit]
        if self.transposed:
            right = right[:, first:end]
        else:
            left = left[first:end]
        # Fresh memory would cost more than the product.
        product = scratch("product", left.dtype, len(left) * right.shape[1]).view(len(left), -1)
        torch.mm(left, right, out=product)
        if self.scale != 1:
            product.mul_(self.scale)
        return product.T if self.transposed else product

    def with_exact_scale(self) -> Product:
        """The same numbers with less to do: a power of two goes into a factor without any rounding."""
        if abs(math.frexp(self.scale)[0]) != 0.5 or not 2**-24 <= abs(self.scale) <= 2**24:
            return self
        return replace(self, left=self.left * self.scale, scale=1.0)


def remembered(tensor: DerivedTensor, elements: ReadElements) -> ReadElements:
    """The same elements, computed once: methods that look at a tensor in several passes read the second from memory.

    Of tensors up to a size; a larger one is computed again, so that memory does not grow with the model.
    """
    if not 0 < tensor.nbytes <= _REMEMBERED_BYTES:
        return elements
    kept: dict[int, Any] = {}  # first element → its piece; pieces are the same in every pass

    def once(first: int, into: Any) -> None:
        piece = kept.get(first)
        if piece is not None and len(piece) == len(into):
            into[:] = piece
            return
        elements(first, into)
        kept[first] = into.copy()

    return once


def column_norms(source: AnyTensor, elements: ReadElements, product: Product, grid: Grid) -> torch.Tensor:
    """Euclidean norm of each column of the changed weight, by one pass over it; float64 sums, one rounding."""
    import torch

    total = torch.zeros(grid.width, dtype=torch.float64)
    high = high_format(source.dtype)
    for unit, first, end in grid.tiles(0, source.numel):
        rows = read_whole(source, elements, (unit * grid.rows + first) * grid.width, (end - first) * grid.width)
        changed = rows.view(end - first, grid.width).to(high) + product.rows(unit, first, end)
        total += changed.double().square_().sum(0)
    return total.sqrt_().to(high)


def add_product(
    source: AnyTensor, elements: ReadElements, product: Product, grid: Grid, *, round_change: bool
) -> ReadElements:
    """``source`` with the product added.

    Args:
        round_change: Whether the change is rounded to the format of the weight before it is added, not the sum alone.
    """
    add = _addition(source, round_change)

    def changed(first: int, into: Any) -> None:
        elements(first, into)
        end = first + len(into) // source.dtype.size
        for unit, top, bottom in grid.tiles(first, end):
            start = (unit * grid.rows + top) * grid.width
            change = product.rows(unit, top, bottom).reshape(-1)
            low, high = max(first, start), min(end, start + len(change))
            there = into[(low - first) * source.dtype.size : (high - first) * source.dtype.size]
            add(there, change[low - start : high - start])

    return changed


def _addition(tensor: AnyTensor, round_change: bool) -> Callable[[Any, torch.Tensor], None]:
    """How a change is added to stored numbers of ``tensor``, in place: compiled and in one go for large bfloat16."""
    if tensor.dtype.code == "BF16" and tensor.numel >= _COMPILED_FROM_ELEMENTS:
        from mergegate.merge_core.methods.kernels import add_change

        return lambda stored, change: add_change(patterns(stored, tensor.dtype), change.numpy(), round_change)

    def add(stored: Any, change: torch.Tensor) -> None:
        there = as_torch(stored, tensor.dtype)
        if round_change or there.dtype == change.dtype:
            there.add_(change.to(there.dtype))
        else:  # One rounding, of the sum. An addition of two formats does the same in smaller steps.
            wide = scratch("wide", change.dtype, len(change))
            there.copy_(wide.copy_(there).add_(change))

    return add


def scale_directions(
    source: AnyTensor, elements: ReadElements, product: Product, grid: Grid, magnitude: torch.Tensor
) -> ReadElements:
    """DoRA: the changed weight with its norms replaced by ``magnitude``, of rows, or of columns where it is transposed.

    There is no epsilon: a direction without length gives no number, and the merge is refused for that.
    """
    import torch

    size, numeric = source.dtype.size, high_format(source.dtype)
    of_columns = None
    if product.transposed:
        of_columns = (magnitude / column_norms(source, elements, product, grid)).view(1, -1)

    def changed(first: int, into: Any) -> None:
        values = as_torch(into, source.dtype)
        end = first + len(into) // size
        for unit, top, bottom in grid.tiles(first, end):
            start = (unit * grid.rows + top) * grid.width
            rows = read_whole(source, elements, start, (bottom - top) * grid.width).view(bottom - top, grid.width)
            moved = rows.to(numeric) + product.rows(unit, top, bottom)
            if of_columns is None:
                norms = torch.linalg.norm(moved, dim=1)
                moved = (magnitude[top:bottom] / norms).view(-1, 1) * moved
            else:
                moved = of_columns * moved
            low, high = max(first, start), min(end, start + rows.numel())
            values[low - first : high - first] = moved.reshape(-1)[low - start : high - start].to(values.dtype)

    return changed

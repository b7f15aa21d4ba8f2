"""Compute adapted values as PEFT rounds them, and factor a change by two matrices of low rank.

torch is imported lazily.

The product of two factors is computed in tiles of complete rows on a fixed grid, so an element does not depend on the
block in which it is read. Each tile is bit-identical to the same part of the full product. This requires tiles of at
least 16 rows, because with few rows, torch computes matrix-vector products, which sum in a different order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint import AnyTensor, DerivedTensor, ReadElements, ReadStored, StoredTensor, patterns

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.checkpoint import DType


# A tile fits in the cache of a core and is large enough to amortize its calls. Every tile, including the last one, has
# at least _FEWEST_ROWS rows.
_TILE_ELEMENTS = 1 << 18
_FEWEST_ROWS = 16
# From this size on, the compiled addition is worth loading. For smaller tensors, torch gives the same result.
_COMPILED_FROM_ELEMENTS = 1 << 20
_scratch = threading.local()


def elements_of(tensor: AnyTensor, read: ReadStored) -> ReadElements:
    """Return a reader for the elements of ``tensor``. It calls ``read`` to read stored tensors."""
    if isinstance(tensor, DerivedTensor):
        return tensor.open(read)
    return lambda first, into: read(tensor, first, into)


def read_whole(tensor: AnyTensor, elements: ReadElements, first: int = 0, count: int | None = None) -> torch.Tensor:
    """Return ``count`` elements of ``tensor`` from ``first`` on, one-dimensional, in its own format. Default: all."""
    into = np.empty((tensor.numel - first if count is None else count) * tensor.dtype.size, np.uint8)
    elements(first, into)
    return as_torch(into, tensor.dtype)


def read_tensor(tensor: AnyTensor, read: ReadStored) -> torch.Tensor:
    """Return all of ``tensor`` in its own format and shape."""
    return read_whole(tensor, elements_of(tensor, read)).view(tensor.shape)


def read_factor(tensor: StoredTensor, read: ReadStored, high: torch.dtype) -> torch.Tensor:
    """Return all of ``tensor``, a factor or a vector of an adapter, in the format ``high``."""
    return read_tensor(tensor, read).to(high)


def as_torch(stored_values: Any, dtype: DType) -> torch.Tensor:
    """Return a one-dimensional tensor of the format ``dtype`` that shares its memory with ``stored_values``."""
    import torch

    return torch.from_numpy(stored_values).view(getattr(torch, dtype.torch_name))


def high_format(dtype: DType) -> torch.dtype:
    """Return the format in which to compute with ``dtype``: float64 for float64, and float32 for all others."""
    import torch

    return torch.float64 if dtype.code == "F64" else torch.float32


def scratch(use: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return thread-local memory for ``count`` numbers. The next call with the same ``use`` and ``dtype`` reuses it."""
    import torch

    buffers: dict[tuple[str, torch.dtype], torch.Tensor] = _scratch.__dict__.setdefault("buffers", {})
    if (use, dtype) not in buffers or len(buffers[use, dtype]) < count:
        buffers[use, dtype] = torch.empty(count, dtype=dtype)
    return buffers[use, dtype][:count]


@dataclass(frozen=True)
class Grid:
    """Division of ``units`` consecutive matrices, each of ``rows`` rows of ``width`` elements, into tiles of rows."""

    units: int
    rows: int
    width: int

    def tiles(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield each tile with elements from index ``first`` up to, but not including, index ``end``.

        A tile consists of the index of its matrix, its first row, and the row after its last row.
        """
        step = max(_FEWEST_ROWS, _TILE_ELEMENTS // max(self.width, 1) // _FEWEST_ROWS * _FEWEST_ROWS)
        count = max(1, self.rows // step)
        # The remainder is a separate tile only if it has enough rows. Otherwise it extends the last tile.
        if self.rows > count * step and self.rows - count * step >= _FEWEST_ROWS:
            count += 1
        position = first
        while position < end:
            unit, row = divmod(position // self.width, self.rows)
            number = min(row // step, count - 1)
            last = self.rows if number == count - 1 else (number + 1) * step
            yield unit, number * step, last
            position = (unit * self.rows + last) * self.width


@dataclass(frozen=True)
class Product:
    """Change of a weight: ``scale · (left @ right)`` for each of its matrices (units), or the transpose.

    Args:
        left: Factors ``[units, out, rank]``.
        right: Factors ``[units, rank, in]``.
        scale: Factor of the product, as in PEFT.
        transposed: Whether the weight is stored as ``[in, out]``.
        first_row: Row of the product at which the weight starts, if the product covers more than this weight.
    """

    left: torch.Tensor
    right: torch.Tensor
    scale: float
    transposed: bool = False
    first_row: int = 0

    def rows(self, unit: int, first: int, end: int) -> torch.Tensor:
        """Return the rows ``first`` to ``end`` (exclusive) of the change of matrix ``unit``, ``[end - first, width]``.

        The next call in the same thread overwrites the result.
        """
        import torch

        first, end = first + self.first_row, end + self.first_row
        left, right = self.left[unit], self.right[unit]
        if self.transposed:
            right = right[:, first:end]
        else:
            left = left[first:end]
        # Allocating memory would take longer than the product.
        product = scratch("product", left.dtype, len(left) * right.shape[1]).view(len(left), -1)
        torch.mm(left, right, out=product)
        if self.scale != 1:
            product.mul_(self.scale)
        return product.T if self.transposed else product


def add_product(
    source: AnyTensor, elements: ReadElements, product: Product, grid: Grid, *, round_change: bool
) -> ReadElements:
    """Return a reader for the weight ``source``, whose elements ``elements`` reads, plus ``product``.

    With ``round_change``, the change is rounded to the format of the weight before it is added. Without it, only the
    sum is rounded. ``grid`` divides the weight into tiles.
    """
    is_compiled = source.dtype.code == "BF16" and source.numel >= _COMPILED_FROM_ELEMENTS
    if is_compiled:
        from mergegate.merge_core.methods.kernels import add_change

    def write_change(first: int, into: Any) -> None:
        elements(first, into)
        end = first + len(into) // source.dtype.size
        for unit, top, bottom in grid.tiles(first, end):
            start = (unit * grid.rows + top) * grid.width
            tile = product.rows(unit, top, bottom).reshape(-1)
            low, high = max(first, start), min(end, start + len(tile))
            stored = into[(low - first) * source.dtype.size : (high - first) * source.dtype.size]
            change = tile[low - start : high - start]
            if is_compiled:
                add_change(patterns(stored, source.dtype), change.numpy(), round_change)
                continue
            values = as_torch(stored, source.dtype)
            if round_change or values.dtype == change.dtype:
                values.add_(change.to(values.dtype))
            else:  # Round only the sum. Adding two formats directly gives the same result, but in smaller steps.
                wide = scratch("wide", change.dtype, len(change))
                values.copy_(wide.copy_(values).add_(change))

    return write_change


def scale_directions(
    source: AnyTensor, elements: ReadElements, product: Product, grid: Grid, magnitude: torch.Tensor
) -> ReadElements:
    """Return a reader for DoRA: the changed weight, with its rows scaled to the norms ``magnitude``.

    For a transposed weight, the columns are scaled. A row of zeros becomes NaN, which the merge refuses.
    """
    import torch

    size, numeric = source.dtype.size, high_format(source.dtype)
    column_scales = None
    if product.transposed:  # One pass computes the norms of all columns, summed in float64 and rounded once.
        squares = torch.zeros(grid.width, dtype=torch.float64)
        for unit, top, bottom in grid.tiles(0, source.numel):
            start = (unit * grid.rows + top) * grid.width
            rows = read_whole(source, elements, start, (bottom - top) * grid.width).view(bottom - top, grid.width)
            moved = rows.to(numeric) + product.rows(unit, top, bottom)
            squares += moved.double().square_().sum(0)
        column_scales = (magnitude / squares.sqrt_().to(numeric)).view(1, -1)

    def write_change(first: int, into: Any) -> None:
        values = as_torch(into, source.dtype)
        end = first + len(into) // size
        for unit, top, bottom in grid.tiles(first, end):
            start = (unit * grid.rows + top) * grid.width
            rows = read_whole(source, elements, start, (bottom - top) * grid.width).view(bottom - top, grid.width)
            moved = rows.to(numeric) + product.rows(unit, top, bottom)
            if column_scales is None:
                norms = torch.linalg.norm(moved, dim=1)
                moved = (magnitude[top:bottom] / norms).view(-1, 1) * moved
            else:
                moved = column_scales * moved
            low, high = max(first, start), min(end, start + rows.numel())
            values[low - first : high - first] = moved.reshape(-1)[low - start : high - start].to(values.dtype)

    return write_change


# Up to this size, a full decomposition takes seconds. Above it, only the strongest directions are computed.
_FULL_DECOMPOSITION = 1024
_OVERSAMPLED, _ITERATIONS = 16, 6


@dataclass(frozen=True)
class LowRankChange:
    """Change of a weight ``Δ``, approximated by ``B @ A``.

    Args:
        a: Factor ``A``, ``[rank, in]``.
        b: Factor ``B``, ``[out, rank]``.
        left_out: Squared norm of ``Δ - B @ A``, with the factors in their final format.
        squared: Squared norm of ``Δ``.
    """

    a: torch.Tensor
    b: torch.Tensor
    left_out: float
    squared: float

    @property
    def error(self) -> float:
        """Norm of ``Δ - B @ A``, divided by the norm of ``Δ``."""
        return math.sqrt(max(self.left_out, 0.0) / self.squared) if self.squared else 0.0


def factor_change(change: torch.Tensor, rank: int, *, epsilon: float = 0.0, dtype: torch.dtype) -> LowRankChange:
    """Approximate a change ``[out, in]`` by the factors ``B = U sqrt(S)`` and ``A = sqrt(S) Vᵀ`` of its SVD.

    Args:
        change: Change of a weight, in float32 or float64.
        rank: Maximum rank.
        epsilon: Limit up to which singular values are dropped, except for the largest.
        dtype: Format of the factors.
    """
    import torch

    max_rank = min(rank, *change.shape)
    if min(change.shape) <= _FULL_DECOMPOSITION or max_rank + _OVERSAMPLED >= min(change.shape):
        u, s, vh = torch.linalg.svd(change, full_matrices=False)
    else:  # Only the strongest directions, by subspace iteration from a fixed start.
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(change.shape[1], max_rank + _OVERSAMPLED, generator=generator, dtype=change.dtype)
        basis = torch.linalg.qr(change @ start)[0]
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(change @ torch.linalg.qr(change.T @ basis)[0])[0]
        u, s, vh = torch.linalg.svd(basis.T @ change, full_matrices=False)
        u = basis @ u
    rank = min(max_rank, max(1, int((s > epsilon).sum())))
    root = s[:rank].sqrt()
    a, b = (root[:, None] * vh[:rank]).to(dtype), (u[:, :rank] * root).to(dtype)
    rest = change - b.to(change.dtype) @ a.to(change.dtype)
    return LowRankChange(a, b, float(rest.double().square().sum()), float(change.double().square().sum()))


def factor_sum(
    factors: Sequence[tuple[float, torch.Tensor, torch.Tensor]], rank: int | None, *, dtype: torch.dtype
) -> LowRankChange:
    """Return factors for the sum of ``weight · B @ A`` over ``factors``, which are triples ``(weight, A, B)``.

    With ``rank`` None, the result is exact, and its rank is the sum of the ranks. With a smaller rank, it is truncated.
    The full product is never computed: QR decompositions of the stacked factors reduce it to a core matrix whose size
    is the sum of the ranks. ``dtype`` is the format of the result.
    """
    import torch

    a = torch.cat([weight * factor for weight, factor, _ in factors])
    b = torch.cat([factor for _, _, factor in factors], dim=1)
    core_left, r_left = torch.linalg.qr(b.double())
    core_right, r_right = torch.linalg.qr(a.double().T)
    core = r_left @ r_right.T
    squared = float(core.square().sum())
    if rank is None or rank >= len(a):
        return LowRankChange(a.to(dtype), b.to(dtype), 0.0, squared)
    u, s, vh = torch.linalg.svd(core, full_matrices=False)
    root = s[:rank].sqrt()
    near, far = (core_left @ u[:, :rank] * root).to(dtype), (root[:, None] * (vh[:rank] @ core_right.T)).to(dtype)
    # ‖Δ - BA‖² = ‖Δ‖² - 2⟨Δ, BA⟩ + ‖BA‖², where each term is computed from products of thin factors.
    b_, a_, near_, far_ = b.double(), a.double(), near.double(), far.double()
    shared = float(((b_.T @ near_) * (a_ @ far_.T)).sum())
    own = float(((near_.T @ near_) * (far_ @ far_.T)).sum())
    return LowRankChange(far, near, squared - 2 * shared + own, squared)

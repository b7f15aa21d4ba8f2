"""Define the tensors of a model with an adapter applied, which are computed while they are read.

They can be nested: the tensor that an adapter changes may be derived itself. Values are rounded as PEFT rounds them.
torch is imported lazily.

The product of two factors is computed in tiles of complete rows on a fixed grid, so an element does not depend on the
block in which it is read. Each tile is bit-identical to the same part of the full product. This requires tiles of at
least 16 rows, because with few rows, torch computes matrix-vector products, which sum in a different order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint import (
    AnyTensor,
    DerivedTensor,
    ReadElements,
    ReadStored,
    StoredTensor,
    elements_of,
    patterns,
)

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.checkpoint import DType


_CACHED_BYTES = 64 << 20


@dataclass(frozen=True)
class AdapterOwnTensor(DerivedTensor):
    """Full tensor ``own`` of the adapter, converted to the format of the model's tensor ``replaced``.

    If it has fewer rows, the rows beyond are those of ``replaced``.
    """

    replaced: AnyTensor
    own: StoredTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (*self.replaced.parts, self.own)

    def identity(self) -> Any:
        return ["brought"]

    def open(self, read: ReadStored) -> ReadElements:
        rows_beyond = elements_of(self.replaced, read)

        def elements(first: int, into: Any) -> None:
            memory = as_torch(into, self.dtype)
            count = max(0, min(len(memory), self.own.numel - first))
            if count < len(memory):
                rows_beyond(first, into)
            memory[:count] = read_whole(self.own, elements_of(self.own, read), first, count)

        return elements


@dataclass(frozen=True)
class AdaptedWeight(DerivedTensor):
    """A weight plus the product of two factors, with replaced magnitudes if the adapter uses DoRA.

    Args:
        source: Weight of the model.
        a: ``lora_A``, ``[rank, in]``. For several experts, ``[experts · rank, in]``, grouped by expert.
        b: ``lora_B``, ``[out, rank]``. For several experts, ``[out, rank · experts]``, grouped by rank.
        magnitude: Magnitudes of DoRA. None for plain LoRA.
        scale: Number by which the product is multiplied.
        transposed: Whether the weight is stored as ``[in, out]``.
        experts: Number of experts that the factors cover.
        expert: Index of the expert that the weight belongs to. None if it contains all experts in order.
        first_row: Row of the product at which the weight starts, if the product covers more than this weight.
        round_change: Whether the change is rounded to the weight's format before it is added, as PEFT does for
            embeddings and parameters.
    """

    source: AnyTensor
    a: StoredTensor
    b: StoredTensor
    scale: float
    magnitude: StoredTensor | None = None
    transposed: bool = False
    experts: int = 1
    expert: int | None = None
    first_row: int = 0
    round_change: bool = False

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        own = (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)
        return (*self.source.parts, *own)

    def identity(self) -> Any:
        inner = self.source.identity() if isinstance(self.source, DerivedTensor) else None
        settings = [self.scale, self.transposed, self.experts, self.expert, self.first_row, self.round_change]
        return ["adapted", inner, *settings, self.magnitude is not None]

    def open(self, read: ReadStored) -> ReadElements:
        elements, numeric = elements_of(self.source, read), high_format(self.dtype)
        # ``left`` becomes [units, out, rank], and ``right`` becomes [units, rank, in].
        rank, width = self.a.shape[0] // self.experts, self.a.shape[1]
        b = read_factor(self.b, read, numeric)
        b = b.view(len(b), rank, self.experts)
        if self.expert is None:
            left = b.permute(2, 0, 1).contiguous()
            right = read_factor(self.a, read, numeric).view(self.experts, rank, width)
        else:  # Only the rows of one expert are read from A. Its columns of B are not contiguous, so all of B is read.
            left = b[:, :, self.expert].contiguous().unsqueeze(0)
            count = rank * width
            own = read_whole(self.a, elements_of(self.a, read), self.expert * count, count)
            right = own.view(1, rank, width).to(numeric)
        scale = self.scale
        if abs(math.frexp(scale)[0]) == 0.5 and 2**-24 <= abs(scale) <= 2**24:
            left, scale = left * scale, 1.0  # A power of two is exact in a factor, which saves a multiplication.
        product = Product(left, right, scale, self.transposed, self.first_row)
        grid = Grid(len(left), self.shape[-2], self.shape[-1])
        if self.magnitude is None:
            # For methods with several passes over a tensor, computing it again is faster than caching it.
            return add_product(self.source, elements, product, grid, round_change=self.round_change)
        magnitude = read_factor(self.magnitude, read, numeric).reshape(-1)
        changed = scale_directions(self.source, elements, product, grid, magnitude)
        # Methods need several passes over a tensor, with the same blocks in each, so computed blocks are cached. Large
        # tensors are computed again instead, so that memory does not grow with the model.
        if not 0 < self.nbytes <= _CACHED_BYTES:
            return changed
        blocks: dict[int, Any] = {}  # By their first element.

        def read_cached(first: int, into: Any) -> None:
            block = blocks.get(first)
            if block is not None and len(block) == len(into):
                into[:] = block
                return
            changed(first, into)
            blocks[first] = into.copy()

        return read_cached


@dataclass(frozen=True)
class AdaptedBias(DerivedTensor):
    """A bias ``source`` of the model plus ``scale`` times ``shift``, the bias of ``lora_B``."""

    source: AnyTensor
    shift: StoredTensor
    scale: float

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (*self.source.parts, self.shift)

    def identity(self) -> Any:
        return ["bias", self.source.identity() if isinstance(self.source, DerivedTensor) else None, self.scale]

    def open(self, read: ReadStored) -> ReadElements:
        elements, numeric = elements_of(self.source, read), high_format(self.dtype)
        shift = read_factor(self.shift, read, numeric) * self.scale

        def write_change(first: int, into: Any) -> None:
            elements(first, into)
            values = as_torch(into, self.dtype)
            values.add_(shift[first : first + len(values)])

        return write_change


@dataclass(frozen=True)
class TrainedRows(DerivedTensor):
    """An embedding with some rows replaced by rows of the adapter.

    Args:
        source: Embedding of the model.
        values: Rows of the adapter.
        rows: Index in the embedding for each row of the adapter.
    """

    source: AnyTensor
    values: StoredTensor
    rows: tuple[int, ...]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (*self.source.parts, self.values)

    def identity(self) -> Any:
        return ["rows", self.source.identity() if isinstance(self.source, DerivedTensor) else None, list(self.rows)]

    def open(self, read: ReadStored) -> ReadElements:
        import torch

        elements, width = elements_of(self.source, read), self.shape[1]
        dtype: torch.dtype = getattr(torch, self.dtype.torch_name)
        values = read_factor(self.values, read, dtype)
        positions: Mapping[int, int] = {row: index for index, row in enumerate(self.rows)}

        def write_change(first: int, into: Any) -> None:
            elements(first, into)
            memory = as_torch(into, self.dtype)
            end = first + len(memory)
            for row in sorted(positions.keys() & set(range(first // width, -(-end // width)))):
                low, high = max(first, row * width), min(end, (row + 1) * width)
                memory[low - first : high - first] = values[positions[row], low - row * width : high - row * width]

        return write_change


@dataclass(frozen=True)
class MemoryRows(DerivedTensor):
    """A parameter in memory that consists of rows of the stored tensor ``source``.

    Args:
        source: Stored tensor.
        first_row: First row of the stored tensor that belongs to the parameter.
        heads: Number of attention heads if transformers reorders the rows of each head for rotary positions, else 0.
            It moves rows 0, 2, 4, … of a head before rows 1, 3, 5, ….
    """

    source: AnyTensor
    first_row: int = 0
    heads: int = 0

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.source.parts

    @property
    def width(self) -> int:
        return math.prod(self.shape[1:])

    def identity(self) -> Any:
        inner = self.source.identity() if isinstance(self.source, DerivedTensor) else None
        return ["rows of a stored tensor", inner, self.first_row, self.heads, list(self.shape)]

    def open(self, read: ReadStored) -> ReadElements:
        elements, start = elements_of(self.source, read), self.first_row * self.width
        if not self.heads:
            return lambda first, into: elements(start + first, into)
        values = self.reorder(read_whole(self.source, elements, start, self.numel))
        return lambda first, into: _copy(values, first, into, self.dtype)

    def reorder(self, values: torch.Tensor, *, stored: bool = False) -> torch.Tensor:
        """Return ``values`` of the stored rows in the order of memory, or in the order of the disk if ``stored``."""
        half = self.shape[0] // self.heads // 2
        form = (2, half) if stored else (half, 2)
        return values.view(self.heads, *form, self.width).transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class JoinedRows(DerivedTensor):
    """A stored tensor ``source`` in which the rows of some parameters in memory are replaced.

    Args:
        source: Stored tensor.
        rows: Parameters that are replaced.
        changed: Their new values.
    """

    source: AnyTensor
    rows: tuple[MemoryRows, ...]
    changed: tuple[AnyTensor, ...]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        # The first part is the stored tensor that this one replaces.
        inner = (part for tensor in self.changed for part in tensor.parts)
        return tuple(dict.fromkeys((*self.source.parts, *inner)))

    def identity(self) -> Any:
        inner = [tensor.identity() if isinstance(tensor, DerivedTensor) else None for tensor in self.changed]
        return ["joined rows", [rows.identity() for rows in self.rows], inner]

    def open(self, read: ReadStored) -> ReadElements:
        elements, readers = elements_of(self.source, read), []
        for rows, tensor in zip(self.rows, self.changed, strict=True):
            reader = elements_of(tensor, read)
            if rows.heads:  # Rows of the stored order are scattered over the parameter.
                values = rows.reorder(read_whole(tensor, reader), stored=True)
                reader = _reader_of(values, tensor.dtype)
            start = rows.first_row * rows.width
            readers.append((start, start + rows.numel, reader))

        def write_change(first: int, into: Any) -> None:
            elements(first, into)
            size = self.dtype.size
            end = first + len(into) // size
            for start, stop, reader in readers:
                low, high = max(first, start), min(end, stop)
                if low < high:
                    reader(low - start, into[(low - first) * size : (high - first) * size])

        return write_change


def _reader_of(values: torch.Tensor, dtype: DType) -> ReadElements:
    return lambda first, into: _copy(values, first, into, dtype)


def _copy(values: torch.Tensor, first: int, into: Any, dtype: DType) -> None:
    memory = as_torch(into, dtype)
    memory.copy_(values[first : first + len(memory)])


# A tile fits in the cache of a core and is large enough to amortize its calls. Every tile, including the last one, has
# at least _FEWEST_ROWS rows.
_TILE_ELEMENTS = 1 << 18
_FEWEST_ROWS = 16
# From this size on, the compiled addition is worth loading. For smaller tensors, torch gives the same result.
_COMPILED_FROM_ELEMENTS = 1 << 20
_scratch = threading.local()


def read_whole(tensor: AnyTensor, elements: ReadElements, first: int = 0, count: int | None = None) -> torch.Tensor:
    """Return ``count`` elements of ``tensor`` from ``first`` on, one-dimensional, in its own format. Default: all."""
    into = np.empty((tensor.numel - first if count is None else count) * tensor.dtype.size, np.uint8)
    elements(first, into)
    return as_torch(into, tensor.dtype)


def read_tensor(tensor: AnyTensor, read: ReadStored) -> torch.Tensor:
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

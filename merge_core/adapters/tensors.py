"""Tensors of a model with an adapter applied: each is computed from the model's own and the adapter's while it is read.

They stack: a weight that an adapter brings along may itself be changed by factors, and the model's own may be derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.adapters.arithmetic import (
    Grid,
    Product,
    add_product,
    as_torch,
    elements_of,
    high_format,
    read_factor,
    read_whole,
    remembered,
    scale_directions,
)
from mergegate.merge_core.checkpoint import AnyTensor, DerivedTensor, ReadElements, ReadStored, StoredTensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AdapterOwnTensor(DerivedTensor):
    """A tensor that the adapter brings along whole, in the place and format of the model's own."""

    place: AnyTensor
    own: StoredTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (*self.place.parts, self.own)

    def identity(self) -> Any:
        return ["brought"]

    def open(self, read: ReadStored) -> ReadElements:
        def elements(first: int, into: Any) -> None:
            count = len(into) // self.dtype.size
            values = read_whole(self.own, lambda at, memory: read(self.own, at, memory), first, count)
            as_torch(into, self.dtype).copy_(values)

        return elements


@dataclass(frozen=True)
class AdaptedWeight(DerivedTensor):
    """A weight with the product of two factors added, and its magnitudes replaced where the adapter is DoRA.

    Args:
        source: The model's own.
        a: ``lora_A`` ``[rank, in]``, or of all experts ``[experts · rank, in]``, expert by expert.
        b: ``lora_B`` ``[out, rank]``, or of all experts ``[out, rank · experts]``, rank by rank.
        magnitude: Of DoRA.
        scale: What the product is multiplied by.
        transposed: Whether the weight is stored as ``[in, out]``.
        experts: How many the factors are for.
        expert: Of which of them the weight is; None: of all, one after the other.
        first_row: Of the weight in the product, where it is a part of it.
        round_change: Whether the change is rounded before it is added, as PEFT does here.
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
        said = [self.scale, self.transposed, self.experts, self.expert, self.first_row, self.round_change]
        return ["adapted", inner, *said, self.magnitude is not None]

    def open(self, read: ReadStored) -> ReadElements:
        elements, numeric = elements_of(self.source, read), high_format(self.dtype)
        left, right = self._factors(read, numeric)
        product = Product(left, right, self.scale, self.transposed, self.first_row).with_exact_scale()
        units = len(left)
        grid = Grid(units, self.shape[-2], self.shape[-1])
        if self.magnitude is None:
            # Quicker computed again than kept, for methods that look at a tensor in several passes.
            return add_product(self.source, elements, product, grid, round_change=self.round_change)
        magnitude = read_factor(self.magnitude, read, numeric).reshape(-1)
        return remembered(self, scale_directions(self.source, elements, product, grid, magnitude))

    def _factors(self, read: ReadStored, numeric: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``[units, out, rank]`` and ``[units, rank, in]``."""
        b = read_factor(self.b, read, numeric)
        rank = self.a.shape[0] // self.experts
        if self.expert is None:
            a = read_factor(self.a, read, numeric).view(self.experts, rank, -1)
            return b.view(len(b), rank, self.experts).permute(2, 0, 1).contiguous(), a
        # Of one expert: only its rows of A are read; those of B lie apart.
        width = self.a.shape[1]
        count = rank * width
        own = read_whole(self.a, lambda at, memory: read(self.a, at, memory), self.expert * count, count)
        return (
            b.view(len(b), rank, self.experts)[:, :, self.expert].contiguous().unsqueeze(0),
            own.view(1, rank, width).to(numeric),
        )


@dataclass(frozen=True)
class AdaptedBias(DerivedTensor):
    """A bias with the scaled one of ``lora_B`` added."""

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

        def changed(first: int, into: Any) -> None:
            elements(first, into)
            values = as_torch(into, self.dtype)
            values.add_(shift[first : first + len(values)])

        return changed


@dataclass(frozen=True)
class TrainedRows(DerivedTensor):
    """An embedding of which the adapter brings some rows.

    Args:
        source: The model's own.
        values: The rows, one after the other.
        rows: Which they are.
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
        at: Mapping[int, int] = {row: index for index, row in enumerate(self.rows)}

        def changed(first: int, into: Any) -> None:
            elements(first, into)
            memory = as_torch(into, self.dtype)
            end = first + len(memory)
            for row in sorted(at.keys() & set(range(first // width, -(-end // width)))):
                low, high = max(first, row * width), min(end, (row + 1) * width)
                memory[low - first : high - first] = values[at[row], low - row * width : high - row * width]

        return changed

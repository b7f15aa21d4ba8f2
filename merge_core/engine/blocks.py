"""The inputs of a job, block by block: read into reused memory, then seen as stored numbers or as tensors.

Every pass reads them again: the second time they come from the page cache, at the speed of memory.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from merge_core.checkpoint import (
    AnyTensor,
    DerivedTensor,
    DType,
    ReadElements,
    StoredTensor,
    numbers,
    patterns,
    read_into,
)
from merge_core.engine.finite import PIECE_BYTES, count_non_finite
from merge_core.errors import InvalidInput
from merge_core.methods import Block, StoredBlock
from merge_core.plan import RowMap, TensorJob

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

# Rows of a buffer begin at cache lines, which also aligns every number format.
_ALIGN = 64
# Sizes of buffers are multiples of this, so that they fit again.
_BUFFER_UNIT = 1 << 20
# Of each input, so that a few huge tensors do not drive each other out of the page cache.
_AHEAD_BYTES = 128 << 20
# Linux reads only this much for one advice, however much it names.
_ADVICE_BYTES = 1 << 20


class BufferPool:
    """Memory that is used again: fresh pages cost as much as reading into them.

    Mapped, not from the heap, which would keep what is given back between other things.

    Args:
        limit: Bytes above which unused buffers are unmapped before new ones are made.
        pinned: Whether a GPU copies from and to it.
    """

    def __init__(self, limit: int, *, pinned: bool) -> None:
        self._limit, self._pinned = limit, pinned
        self._free: list[Bytes] = []
        self._held = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> Bytes:
        """A buffer of at least ``size`` bytes; give it back with :meth:`give`."""
        size = max(-(-size // _BUFFER_UNIT), 1) * _BUFFER_UNIT
        with self._lock:
            fitting = [at for at, buffer in enumerate(self._free) if size <= len(buffer) <= 2 * size]
            if fitting:
                return self._free.pop(min(fitting, key=lambda at: len(self._free[at])))
            while self._free and self._held + size > self._limit:
                self._held -= len(self._free.pop(0))
            self._held += size
        if self._pinned:
            import torch

            pinned: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # Where there are none.
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Return a buffer that is no longer used."""
        with self._lock:
            self._free.append(buffer)

    def close(self) -> None:
        """Unmap the unused buffers."""
        with self._lock:
            self._held -= sum(map(len, self._free))
            self._free.clear()


def read_ahead(job: TensorJob, files: Mapping[Path, int]) -> None:
    """Have the system read the beginning of each input into the page cache, without waiting for it.

    The disk then works while kernels are loaded and other tensors are computed.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for tensor in job.stored:
        fd, end = files[tensor.file], tensor.offset + min(tensor.nbytes, _AHEAD_BYTES)
        for start in range(tensor.offset, end, _ADVICE_BYTES):
            with suppress(OSError):  # It is advice: reading will find out what is wrong.
                os.posix_fadvise(fd, start, min(_ADVICE_BYTES, end - start), os.POSIX_FADV_WILLNEED)


class JobInputs:
    """The inputs of one job.

    Args:
        job: Which tensors.
        files: Open file descriptor of each of their files.
        block: Elements per block (the last one is shorter).
        grain: Elements per grain; divides ``block``.
        pool: Where memory comes from.
    """

    def __init__(self, job: TensorJob, files: Mapping[Path, int], *, block: int, grain: int, pool: BufferPool) -> None:
        self.job, self.block, self.grain = job, block, grain
        self.numel = job.output.numel
        self.count = -(-self.numel // block)
        self._pool = pool
        self._sizes = [item.tensor.dtype.size for item in job.inputs]
        self._read_elements = [_open_elements(item.tensor, files) for item in job.inputs]

    def load(self, number: int, *, look: bool = False, fused: bool = False) -> LoadedBlock:
        """Block ``number`` in memory; close it (``with``) when its numbers are no longer needed.

        Args:
            number: From 0.
            look: Count NaN and infinity in each input when it has been read (see :mod:`.finite`).
            fused: Whether compiled kernels are used for that.
        """
        start = number * self.block
        length = min(self.block, self.numel - start)
        buffer = self._pool.take(sum(_aligned(length * size) for size in self._sizes))
        rows, position = [], 0
        for size in self._sizes:
            rows.append(buffer[position : position + length * size])
            position += _aligned(length * size)
        non_finite = self._read(rows, start, look, fused)
        return LoadedBlock(self, buffer, rows, start, length, self._pool, non_finite)

    def _read(self, rows: list[Bytes], start: int, look: bool, fused: bool) -> NDArray[np.int64]:
        """Fill ``rows``; of each input, how many of its own elements are not finite, if that is wanted."""
        counts = np.zeros(len(rows), np.int64)
        for index, (item, row, size) in enumerate(zip(self.job.inputs, rows, self._sizes, strict=True)):
            tensor = item.tensor
            if item.rows is not None:
                self._read_rows(index, item.rows, row, start, counts)
                counts[index] += count_non_finite(row, tensor.dtype, fused=fused) if look else 0
                continue
            step = PIECE_BYTES if look else max(len(row), 1)
            for first in range(0, len(row), step):
                piece = row[first : first + step]
                self._read_elements[index](start + first // size, piece)
                counts[index] += count_non_finite(piece, tensor.dtype, fused=fused) if look else 0
        return counts

    def _read_rows(self, index: int, chosen: RowMap, into: Bytes, start: int, lent: NDArray[np.int64]) -> None:
        """Fill ``into`` with the elements from ``start`` of the output's rows, gathered row by row."""
        tensor = self.job.inputs[index].tensor
        size = tensor.dtype.size
        width = self.numel // len(chosen.rows)
        done, length = 0, len(into) // size
        while done < length:
            row, column = divmod(start + done, width)
            count = min(width - column, length - done)
            own = chosen.rows[row]
            if own < 0:
                borrowed = into[done * size : (done + count) * size]
                borrowed[:] = _stored(self._mean_row(chosen.borrowed[row], column, count, lent), tensor.dtype)
                lent[index] -= count_non_finite(borrowed, tensor.dtype, fused=False)  # None of it is its own.
            else:
                # Neighbours in the output are mostly neighbours in the file: one read for all of them.
                last = row
                while done + count < length and last + 1 < len(chosen.rows):
                    if chosen.rows[last + 1] != own + last + 1 - row:
                        break
                    last += 1
                    count = min(count + width, length - done)
                part = into[done * size : (done + count) * size]
                self._read_elements[index](own * width + column, part)
            done += count

    def _mean_row(
        self, rows: tuple[tuple[str, int], ...], column: int, count: int, lent: NDArray[np.int64]
    ) -> torch.Tensor:
        import torch

        total = torch.zeros(count, dtype=torch.float64)
        for model, row in rows:
            index, item = next((at, item) for at, item in enumerate(self.job.inputs) if item.model == model)
            tensor = item.tensor
            width = self.numel // self.job.output.shape[0]
            part = np.empty(count * tensor.dtype.size, np.uint8)
            self._read_elements[index](row * width + column, part)
            broken = count_non_finite(part, tensor.dtype, fused=False)
            if broken and item.rows is not None and row not in item.rows.rows:  # Else it is counted where it belongs.
                lent[index] += broken
            total += torch.from_numpy(part).view(getattr(torch, tensor.dtype.torch_name)).double()
        return total / len(rows)


def _open_elements(tensor: AnyTensor, files: Mapping[Path, int]) -> ReadElements:
    """How to read elements of ``tensor``: from the file where it is stored, else as it is derived."""

    def read(stored: StoredTensor, first: int, into: Bytes) -> None:
        read_into(files[stored.file], into.data, stored.offset + first * stored.dtype.size, stored.file)

    if isinstance(tensor, DerivedTensor):
        return tensor.open(read)
    return lambda first, into: read(tensor, first, into)


def _stored(values: torch.Tensor, dtype: DType) -> Bytes:
    import torch

    stored: Bytes = values.to(getattr(torch, dtype.torch_name)).view(torch.uint8).numpy()
    return stored


class LoadedBlock:
    """A block of a job's inputs in memory."""

    def __init__(
        self,
        inputs: JobInputs,
        buffer: Bytes,
        rows: list[Bytes],
        start: int,
        length: int,
        pool: BufferPool,
        non_finite: NDArray[np.int64],
    ) -> None:
        self.rows, self.start, self.length = rows, start, length
        self.dtypes = [item.tensor.dtype for item in inputs.job.inputs]
        self._inputs, self._buffer, self._pool = inputs, buffer, pool
        # Of each input, how many of its own elements are NaN or infinite, as far as they have been looked at.
        self.non_finite = non_finite
        self._on_device: list[torch.Tensor] = []

    def __enter__(self) -> LoadedBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.give(self._buffer)

    def look_on(self, device: str) -> None:
        """Count NaN and infinity on a GPU, where the numbers are needed next anyway."""
        import torch

        seen = [torch.isfinite(tensor).logical_not().sum() for tensor in self._tensors(device)]
        self.non_finite += torch.stack(seen).cpu().numpy()

    def stored(self) -> StoredBlock:
        """The numbers as they are stored (bfloat16 or float32 throughout), for fused kernels."""
        codes = {dtype.code for dtype in self.dtypes}
        if codes == {"BF16"} or codes == {"F32"}:
            kind: Any = np.uint16 if codes == {"BF16"} else np.float32
            size = np.dtype(kind).itemsize
            base = self._buffer.__array_interface__["data"][0]
            starts = [(row.__array_interface__["data"][0] - base) // size for row in self.rows]
            whole = self._buffer[: len(self._buffer) // size * size].view(kind)
            return StoredBlock(whole, np.array(starts, np.int64), self.length, self.start, self._inputs.grain)
        wide = [
            numbers(patterns(row, dtype), dtype).astype(np.float32)
            for row, dtype in zip(self.rows, self.dtypes, strict=True)
        ]
        rows_at = np.arange(len(self.rows), dtype=np.int64) * self.length
        return StoredBlock(np.concatenate(wide), rows_at, self.length, self.start, self._inputs.grain)

    def tiles(self, size: int, device: str, dtype: torch.dtype) -> Iterator[Block]:
        """The block as tensors of ``dtype`` on ``device``, in tiles of at most ``size`` elements (whole grains)."""
        import torch

        grain = self._inputs.grain
        step = max(1, size // grain) * grain
        tensors = self._tensors(device)
        for first in range(0, self.length, step):
            parts = [tensor[first : first + step].to(dtype) for tensor in tensors]
            yield Block(torch.stack(parts), self.start + first, grain)

    def require_equal(self) -> None:
        """Raise InvalidInput unless all inputs hold the same bytes."""
        inputs = self._inputs.job.inputs
        for item, row in zip(inputs[1:], self.rows[1:], strict=True):
            if not np.array_equal(row, self.rows[0]):
                raise InvalidInput(
                    f"{item.model}: {item.tensor.name}",
                    found=f"{item.tensor.dtype.code} numbers that differ from {inputs[0].model}",
                    expected="equal integers: they are no weights and cannot be merged",
                    remedy="merge models of one kind; a quantised model must be merged before quantisation",
                )

    def _tensors(self, device: str) -> list[torch.Tensor]:
        """The inputs in their own formats on ``device``; copied there once."""
        tensors = [self._tensor(index) for index in range(len(self.rows))]
        if device == "cpu":
            return tensors
        if not self._on_device:
            self._on_device = [tensor.to(device, non_blocking=True) for tensor in tensors]
        return self._on_device

    def _tensor(self, index: int) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtypes[index].torch_name)
        return torch.from_numpy(self.rows[index]).view(dtype)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

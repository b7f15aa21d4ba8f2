"""The inputs of a job, block by block: read into reused memory, then seen as stored numbers or as tensors.

Blocks that several passes look at stay in memory, as far as a small bound goes; what is beyond it is read again, the
second time from the page cache, and computed again where it is derived.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint import (
    AnyTensor,
    DerivedTensor,
    DType,
    ReadElements,
    StoredTensor,
    numbers,
    patterns,
    read_into,
)
from mergegate.merge_core.engine.finite import PIECE_BYTES, count_non_finite
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import Block, StoredBlock
from mergegate.merge_core.plan import MEAN, SEVERAL, ZERO, Input, RowMap, TensorJob
from mergegate.merge_core.system import prefer_large_pages, read_at, read_soon

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
# Rows up to this size are read with one call.
_ONE_READ = 1 << 16


class BufferPool:
    """Memory that is used again: fresh pages cost as much as reading into them.

    Mapped, not from the heap, which would keep what is given back between other things.

    Args:
        limit: Bytes above which unused buffers are unmapped before new ones are made.
        pinned: Whether a GPU copies from and to it.
        kept: Bytes at most of what stays in use from one pass over a tensor to the next.
    """

    def __init__(self, limit: int, *, pinned: bool, kept: int = 0) -> None:
        self._limit, self._pinned, self._may_keep = limit, pinned, kept
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
        prefer_large_pages(memory)
        return np.frombuffer(memory, np.uint8)

    def keep(self, buffer: Bytes) -> bool:
        """Whether a buffer may stay in use until the next pass; if so, :meth:`let_go` before it is given back."""
        with self._lock:
            if len(buffer) > self._may_keep:
                return False
            self._may_keep -= len(buffer)
            return True

    def let_go(self, buffer: Bytes) -> None:
        """The next pass has come."""
        with self._lock:
            self._may_keep += len(buffer)

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
    for tensor in job.stored:
        fd, end = files[tensor.file], tensor.offset + min(tensor.nbytes, _AHEAD_BYTES)
        for start in range(tensor.offset, end, _ADVICE_BYTES):
            if not read_soon(fd, start, min(_ADVICE_BYTES, end - start)):
                return


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
        self._files, self._pool = files, pool
        beside = job.measured_importance
        tensors = [*(item.tensor for item in job.inputs), *beside]
        self.dtypes = [tensor.dtype for tensor in tensors]
        self._row_maps = [*(item.rows for item in job.inputs), *(None for _ in beside)]
        self._read_elements = [open_elements(tensor, files) for tensor in tensors]
        self._means: dict[int, NDArray[np.float64]] = {}  # Of inputs whose table grows.
        self._means_lock = threading.Lock()

    def load(self, number: int, *, look: bool = False, fused: bool = False) -> LoadedBlock:
        """Block ``number`` in memory; close it (``with``) when its numbers are no longer needed.

        Args:
            number: From 0.
            look: Count NaN and infinity in each input when it has been read (see :mod:`.finite`).
            fused: Whether compiled kernels are used for that.
        """
        start = number * self.block
        length = min(self.block, self.numel - start)
        sizes = [dtype.size for dtype in self.dtypes]
        buffer = self._pool.take(sum(_aligned(length * size) for size in sizes))
        rows, position = [], 0
        for size in sizes:
            rows.append(buffer[position : position + length * size])
            position += _aligned(length * size)
        non_finite = self._read(rows, start, look, fused)
        return LoadedBlock(self, buffer, rows, start, length, self._pool, non_finite)

    def _read(self, rows: list[Bytes], start: int, look: bool, fused: bool) -> NDArray[np.int64]:
        """Fill ``rows``; of each, how many of its own elements are not finite, if that is wanted."""
        counts = np.zeros(len(rows), np.int64)
        for index, (dtype, chosen, row) in enumerate(zip(self.dtypes, self._row_maps, rows, strict=True)):
            if chosen is not None:
                self._read_rows(index, chosen, row, start, counts, fused)
                counts[index] += count_non_finite(row, dtype, fused=fused) if look else 0
                continue
            step = PIECE_BYTES if look else max(len(row), 1)
            for first in range(0, len(row), step):
                piece = row[first : first + step]
                self._read_elements[index](start + first // dtype.size, piece)
                counts[index] += count_non_finite(piece, dtype, fused=fused) if look else 0
        return counts

    def _read_rows(
        self, index: int, chosen: RowMap, into: Bytes, start: int, lent: NDArray[np.int64], fused: bool
    ) -> None:
        """Fill ``into`` with the elements from ``start`` of the output's rows, run by run (see ``RowMap``)."""
        tensor = self.job.inputs[index].tensor
        size, width, starts = tensor.dtype.size, self.numel // len(chosen), chosen.starts
        stop = start + len(into) // size
        first = int(np.searchsorted(starts, start // width, "right")) - 1
        last = int(np.searchsorted(starts, (stop - 1) // width, "right")) - 1
        # Where each run begins and ends in the block, in elements of the output.
        begins = np.maximum(starts[first : last + 1] * width, start)
        ends = np.minimum(starts[first + 1 : last + 2] * width, stop)
        at = starts[first : last + 1]
        lenders, rows = chosen.lender[at], chosen.row[at]
        offsets = rows * width + begins - at * width  # In elements of the lender's table.
        own = lenders == chosen.own
        parts = zip(lenders.tolist(), offsets.tolist(), (begins - start).tolist(), (ends - start).tolist(), strict=True)
        view = into.data
        for (lender, offset, begin, end), mine in zip(parts, own.tolist(), strict=True):
            if mine:
                # Rows may be scattered: most are one call, and the careful reader is for all that is not.
                if isinstance(tensor, StoredTensor) and (end - begin) * size <= _ONE_READ:
                    piece, place = view[begin * size : end * size], tensor.offset + offset * size
                    with suppress(OSError):
                        if read_at(self._files[tensor.file], piece, place) == len(piece):
                            continue
                self._read_elements[index](offset, into[begin * size : end * size])
                continue
            part = into[begin * size : end * size]
            self._lend(index, chosen, part, lender, offset, lent)
            if broken := count_non_finite(part, tensor.dtype, fused=fused):
                lent[index] -= broken  # None of it is its own.
                if lender >= 0:
                    self._blame(chosen.models[lender], part, offset, width, lent)

    def _lend(self, index: int, chosen: RowMap, into: Bytes, lender: int, offset: int, lent: NDArray[np.int64]) -> None:
        """Fill ``into`` with what a model lacks.

        Args:
            index: Of the input that lacks it.
            chosen: Its rows.
            into: As many bytes of one run.
            lender: A number of ``RowMap.lender``.
            offset: First element in the lender's table; of the mean only its column counts.
            lent: To which the lenders' broken elements are added, where they are counted nowhere else.
        """
        dtype = self.job.inputs[index].tensor.dtype
        width, count = self.numel // len(chosen), len(into) // self.job.inputs[index].tensor.dtype.size
        if lender == ZERO:
            into[:] = 0
        elif lender == MEAN:
            mean = np.tile(self._mean_row(index, width), -(-count // width) + 1)
            into[:] = _stored(mean[offset % width : offset % width + count], dtype)
        elif lender == SEVERAL:
            # A run of them is one that refers to consecutive shared rows.
            for place in range(offset // width, (offset + count - 1) // width + 1):
                begin = max(place * width, offset)
                part = min((place + 1) * width, offset + count) - begin
                rows = [
                    self._lent(chosen, number, row * width + begin - place * width, part, lent)
                    for number, row in chosen.shared[place]
                ]
                done = (begin - offset) * dtype.size
                into[done : done + part * dtype.size] = _stored(sum(rows, np.zeros(part)) / len(rows), dtype)
        else:
            at, lending = self._input_of(chosen.models[lender])
            if lending.tensor.dtype == dtype:
                self._read_elements[at](offset, into)
            else:
                into[:] = _stored(self._lent(chosen, lender, offset, count), dtype)

    def _lent(
        self, chosen: RowMap, lender: int, offset: int, count: int, lent: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """``count`` elements of a lender's table from ``offset``, as float64."""
        at, lending = self._input_of(chosen.models[lender])
        part = np.empty(count * lending.tensor.dtype.size, np.uint8)
        self._read_elements[at](offset, part)
        if lent is not None:
            self._blame(chosen.models[lender], part, offset, self.numel // len(chosen), lent)
        return _wide(part, lending.tensor.dtype)

    def _blame(self, lender: str, part: Bytes, offset: int, width: int, lent: NDArray[np.int64]) -> None:
        """Count broken elements of lent rows for their lender, unless it reads those rows itself."""
        index, item = self._input_of(lender)
        dtype = item.tensor.dtype
        if not count_non_finite(part, dtype, fused=False):
            return
        for row in range(offset // width, (offset + len(part) // dtype.size - 1) // width + 1):
            begin = max(row * width, offset) - offset
            piece = part[begin * dtype.size : ((row + 1) * width - offset) * dtype.size]
            if item.rows is not None and not item.rows.keeps(row):  # Else it is counted where it belongs.
                # A copy: a row may begin anywhere in the block.
                lent[index] += count_non_finite(piece.copy(), dtype, fused=False)

    def _mean_row(self, index: int, width: int) -> NDArray[np.float64]:
        """The mean over all rows of an input's own table, in the order of its bytes: the same whatever the blocks."""
        with self._means_lock:
            if index not in self._means:
                tensor = self.job.inputs[index].tensor
                total, step = np.zeros(width), max(1, PIECE_BYTES // (width * tensor.dtype.size))
                for first in range(0, tensor.shape[0], step):
                    rows = min(step, tensor.shape[0] - first)
                    part = np.empty(rows * width * tensor.dtype.size, np.uint8)
                    self._read_elements[index](first * width, part)
                    total += _wide(part, tensor.dtype).reshape(rows, width).sum(0)
                self._means[index] = total / max(tensor.shape[0], 1)
            return self._means[index]

    def _input_of(self, model: str) -> tuple[int, Input]:
        return next((at, item) for at, item in enumerate(self.job.inputs) if item.model == model)


def open_elements(tensor: AnyTensor, files: Mapping[Path, int]) -> ReadElements:
    """How to read elements of ``tensor``: from the file where it is stored, else as it is derived."""

    def read(stored: StoredTensor, first: int, into: Bytes) -> None:
        read_into(files[stored.file], into.data, stored.offset + first * stored.dtype.size, stored.file)

    if isinstance(tensor, DerivedTensor):
        return tensor.open(read)
    return lambda first, into: read(tensor, first, into)


def _wide(stored: Bytes, dtype: DType) -> NDArray[np.float64]:
    import torch

    values: NDArray[np.float64] = torch.from_numpy(stored).view(getattr(torch, dtype.torch_name)).double().numpy()
    return values


def _stored(values: NDArray[np.float64], dtype: DType) -> Bytes:
    import torch

    stored: Bytes = torch.from_numpy(values).to(getattr(torch, dtype.torch_name)).view(torch.uint8).numpy()
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
        self.dtypes = inputs.dtypes
        self._inputs, self._buffer, self._pool = inputs, buffer, pool
        # Of each row, how many of its own elements are NaN or infinite, as far as they have been looked at.
        self.non_finite = non_finite
        self._on_device: list[torch.Tensor] = []

    def __enter__(self) -> LoadedBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep(self) -> bool:
        """Whether it may stay for the next pass, which takes it with :meth:`let_go`."""
        return self._pool.keep(self._buffer)

    def let_go(self) -> LoadedBlock:
        """It has stayed long enough."""
        self._pool.let_go(self._buffer)
        return self

    def close(self) -> None:
        """Its memory may be used again."""
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

        grain, count = self._inputs.grain, len(self._inputs.job.inputs)
        step = max(1, size // grain) * grain
        tensors = self._tensors(device)
        for first in range(0, self.length, step):
            parts = [tensor[first : first + step].to(dtype) for tensor in tensors]
            inputs, beside = parts[:count], parts[count:]
            yield Block(torch.stack(inputs), self.start + first, grain, torch.stack(beside) if beside else None)

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

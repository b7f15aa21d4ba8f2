"""Read the inputs of a job block by block into reused memory, and provide them as stored numbers or as tensors.

A few blocks stay in memory from one pass over a tensor to the next. The others are read again, usually from the page
cache, and blocks of derived tensors are computed again.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint import (
    AnyTensor,
    DType,
    ReadElements,
    StoredTensor,
    elements_of,
    numbers,
    patterns,
    read_into,
)
from mergegate.merge_core.engine.health import PIECE_BYTES, count_non_finite, take_constants
from mergegate.merge_core.engine.input_files import InputFiles
from mergegate.merge_core.methods import Block, StoredBlock
from mergegate.merge_core.plan import MEAN, SEVERAL, ZERO, Input, RowMap, TensorJob
from mergegate.merge_core.system import UNCACHED_ALIGN, prefer_large_pages, read_at, read_soon, read_uncached

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

# Rows of a buffer start at multiples of this, the size of a cache line. That also aligns every number format.
_ALIGN = 64
# Kernels inspect numbers in words of this size, which must be aligned.
_WORD_BYTES = 8
# Buffer sizes are multiples of this, so that buffers can be reused.
_BUFFER_UNIT = 1 << 20
# Limits of the read-ahead per input and of all inputs of a tensor, so that a few huge tensors do not evict each other
# from the page cache.
_READ_AHEAD_BYTES, _READ_AHEAD_TOTAL = 128 << 20, 1 << 30
# Largest number of bytes that Linux reads ahead per call.
_ADVICE_BYTES = 1 << 20
# Limit of the bytes of all inputs in a block, so that memory does not grow with the number of inputs.
_BLOCK_BYTES = 32 << 20
# Runs of rows up to this size are read with one call.
_SINGLE_READ_BYTES = 1 << 16


class BufferPool:
    """A pool of reused buffers, because new memory pages cost as much time as reading data into them.

    Buffers are mapped, because the heap would not return their memory to the system between other allocations.

    Args:
        limit: Total bytes above which unused buffers are unmapped before new ones are created.
        pinned: Whether to pin the memory for copies from and to a GPU.
        retained_bytes: Maximum total size of the buffers that :meth:`retain` accepts.
    """

    def __init__(self, limit: int, *, pinned: bool, retained_bytes: int = 0) -> None:
        self._limit, self._pinned, self._retainable = limit, pinned, retained_bytes
        self._free: list[Bytes] = []
        self._mapped_bytes = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> Bytes:
        """Return a buffer of at least ``size`` bytes. Give it back with :meth:`give`."""
        size = max(-(-size // _BUFFER_UNIT), 1) * _BUFFER_UNIT
        with self._lock:
            fitting = [index for index, buffer in enumerate(self._free) if size <= len(buffer) <= 2 * size]
            if fitting:
                return self._free.pop(min(fitting, key=lambda index: len(self._free[index])))
            while self._free and self._mapped_bytes + size > self._limit:
                self._mapped_bytes -= len(self._free.pop(0))
            self._mapped_bytes += size
        if self._pinned:
            import torch

            pinned: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_large_pages(memory)
        return np.frombuffer(memory, np.uint8)

    def retain(self, buffer: Bytes) -> bool:
        """Return whether a buffer may stay in use until the next pass. If so, that pass must call :meth:`reclaim`."""
        with self._lock:
            if len(buffer) > self._retainable:
                return False
            self._retainable -= len(buffer)
            return True

    def reclaim(self, buffer: Bytes) -> None:
        """Stop counting a buffer that :meth:`retain` accepted."""
        with self._lock:
            self._retainable += len(buffer)

    def give(self, buffer: Bytes) -> None:
        with self._lock:
            self._free.append(buffer)

    def close(self) -> None:
        with self._lock:
            self._mapped_bytes -= sum(map(len, self._free))
            self._free.clear()


def block_size(job: TensorJob, grain: int, elements: int) -> int:
    """Return the number of elements in a block: ``elements``, or fewer if there are many inputs, in whole grains."""
    size = sum(item.tensor.dtype.size for item in job.inputs) + sum(item.dtype.size for item in job.measured_importance)
    return max(1, min(elements, _BLOCK_BYTES // max(size, 1)) // grain) * grain


def read_ahead_limit(job: TensorJob) -> int:
    """Return the number of bytes of each input to read ahead."""
    return min(_READ_AHEAD_BYTES, _READ_AHEAD_TOTAL // max(len(job.stored_tensors), 1))


def read_ahead(job: TensorJob, files: InputFiles, limit: int | None = None) -> None:
    """Ask the system to read the first ``limit`` bytes of each input into the page cache in the background.

    The default is :func:`read_ahead_limit`.

    The disk then works while this process loads kernels or computes other tensors. The first parts of all inputs come
    first, because the first block needs them.
    """
    tensors = job.stored_tensors
    limit = read_ahead_limit(job) if limit is None else limit
    for start in range(0, min(limit, max((tensor.nbytes for tensor in tensors), default=0)), _ADVICE_BYTES):
        for tensor in tensors:
            count = min(_ADVICE_BYTES, limit - start, tensor.nbytes - start)
            if count > 0:
                with files.open(tensor.file) as fd:
                    if not read_soon(fd, tensor.offset + start, count):
                        return


class JobInputs:
    """The inputs of one job, divided into blocks.

    Args:
        job: Job of one output tensor.
        files: All input files.
        block: Number of elements in a block, a multiple of ``grain``. The last block may be shorter.
        grain: Number of elements in a grain, the unit of reductions.
        pool: Pool that provides memory.
    """

    def __init__(self, job: TensorJob, files: InputFiles, *, block: int, grain: int, pool: BufferPool) -> None:
        self.job, self.block, self.grain = job, block, grain
        self.numel = job.output.numel
        self.count = -(-self.numel // block)
        self._files, self._pool = files, pool
        importance = job.measured_importance
        tensors = [*(item.tensor for item in job.inputs), *importance]
        self.dtypes = [tensor.dtype for tensor in tensors]
        self._row_maps = [*(item.rows for item in job.inputs), *(None for _ in importance)]
        self._read_elements = [open_elements(tensor, files) for tensor in tensors]
        self._means: dict[int, NDArray[np.float64]] = {}  # Mean rows of inputs that lack rows of the output.
        self._means_lock = threading.Lock()

    def load(
        self, index: int, *, check_finite: bool = False, fused: bool = False, uncached: bool = False
    ) -> LoadedBlock:
        """Read a block into memory. Use it in a ``with`` statement, or close it.

        Args:
            index: Index of the block, from 0.
            check_finite: Whether to count the NaN and infinite elements of each input (see :mod:`.health`).
            fused: Whether to count them with compiled kernels.
            uncached: Whether to bypass the page cache if possible. All inputs must be stored in the output's order.
        """
        start = index * self.block
        length = min(self.block, self.numel - start)
        sizes = [dtype.size for dtype in self.dtypes]
        shifts = self._uncached_shifts(start) if uncached else None
        align = _ALIGN if shifts is None else UNCACHED_ALIGN
        spans = [(shift, shift + length * size) for shift, size in zip(shifts or [0] * len(sizes), sizes, strict=True)]
        area_ends = np.cumsum([-(-end // align) * align for _, end in spans]).tolist()
        buffer = self._pool.take(area_ends[-1])
        areas = [buffer[begin:end] for begin, end in zip([0, *area_ends], area_ends, strict=False)]
        rows = [area[begin:end] for area, (begin, end) in zip(areas, spans, strict=True)]
        non_finite = np.zeros(len(rows), np.int64)
        for number, (dtype, row_map, row) in enumerate(zip(self.dtypes, self._row_maps, rows, strict=True)):
            if row_map is not None:
                self._read_rows(number, row_map, row, start, non_finite, fused)
                non_finite[number] += count_non_finite(row, dtype, fused=fused) if check_finite else 0
                continue
            is_read = shifts is not None and self._read_uncached(number, areas[number], start, shifts[number], len(row))
            step = PIECE_BYTES if check_finite else max(len(row), 1)
            for first in range(0, len(row), step):
                piece = row[first : first + step]
                if not is_read:
                    self._read_elements[number](start + first // dtype.size, piece)
                non_finite[number] += count_non_finite(piece, dtype, fused=fused) if check_finite else 0
        return LoadedBlock(self, buffer, rows, start, length, self._pool, non_finite)

    def _uncached_shifts(self, start: int) -> list[int] | None:
        """Return the distance of each input's elements from ``start`` on to the last multiple of the read alignment.

        None: an input is not stored in the output's order, or kernels could not address its elements.
        """
        stored = self.job.stored_tensors
        if len(stored) != len(self.dtypes) or any(row_map is not None for row_map in self._row_maps):
            return None
        shifts = [(tensor.offset + start * tensor.dtype.size) % UNCACHED_ALIGN for tensor in stored]
        return None if any(shift % _WORD_BYTES for shift in shifts) else shifts

    def _read_uncached(self, number: int, area: Bytes, start: int, shift: int, count: int) -> bool:
        """Fill ``area`` from ``shift`` bytes before an input's element ``start``, bypassing the page cache.

        Return False unless at least ``count`` bytes of the input could be read.
        """
        tensor = self.job.stored_tensors[number]
        with self._files.open(tensor.file) as fd:
            return read_uncached(fd, area.data, tensor.offset + start * tensor.dtype.size - shift) >= shift + count

    def _read_rows(
        self, index: int, row_map: RowMap, target: Bytes, start: int, counts: NDArray[np.int64], fused: bool
    ) -> None:
        """Fill ``target`` with elements of the output's rows from index ``start``, run by run (see ``RowMap``)."""
        tensor = self.job.inputs[index].tensor
        size, width, starts = tensor.dtype.size, self.numel // len(row_map), row_map.starts
        stop = start + len(target) // size
        first = int(np.searchsorted(starts, start // width, "right")) - 1
        last = int(np.searchsorted(starts, (stop - 1) // width, "right")) - 1
        # Start and end of each run in the block, in elements of the output.
        begins = np.maximum(starts[first : last + 1] * width, start)
        ends = np.minimum(starts[first + 1 : last + 2] * width, stop)
        run_starts = starts[first : last + 1]
        lenders, rows = row_map.lender[run_starts], row_map.row[run_starts]
        offsets = rows * width + begins - run_starts * width  # In elements of the lender's table.
        is_own = lenders == row_map.own
        parts = zip(lenders.tolist(), offsets.tolist(), (begins - start).tolist(), (ends - start).tolist(), strict=True)
        view = target.data
        for (lender, offset, begin, end), is_own_run in zip(parts, is_own.tolist(), strict=True):
            if is_own_run:
                # Scattered rows make many short runs. Read each with one call if possible.
                if isinstance(tensor, StoredTensor) and (end - begin) * size <= _SINGLE_READ_BYTES:
                    piece, position = view[begin * size : end * size], tensor.offset + offset * size
                    with suppress(OSError), self._files.open(tensor.file) as fd:
                        if read_at(fd, piece, position) == len(piece):
                            continue
                self._read_elements[index](offset, target[begin * size : end * size])
                continue
            part = target[begin * size : end * size]
            self._fill_lent(index, row_map, part, lender, offset, counts)
            if non_finite := count_non_finite(part, tensor.dtype, fused=fused):
                counts[index] -= non_finite  # The row is counted as a whole, but these elements are the lender's.
                if lender >= 0:
                    self._count_for_lender(row_map.models[lender], part, offset, width, counts)

    def _fill_lent(
        self, index: int, row_map: RowMap, target: Bytes, lender: int, offset: int, counts: NDArray[np.int64]
    ) -> None:
        """Fill ``target`` with rows that a model lacks.

        Args:
            index: Index of the input that lacks the rows.
            row_map: Row map of this input.
            target: Bytes of one run.
            lender: Value from ``RowMap.lender``.
            offset: First element in the lender's table. For ``MEAN``, only its column matters.
            counts: Number of non-finite elements of each input, updated for the lenders of mean rows.
        """
        dtype = self.job.inputs[index].tensor.dtype
        width, count = self.numel // len(row_map), len(target) // self.job.inputs[index].tensor.dtype.size
        if lender == ZERO:
            target[:] = 0
        elif lender == MEAN:
            mean = np.tile(self._mean_row(index, width), -(-count // width) + 1)
            target[:] = _from_float64(mean[offset % width : offset % width + count], dtype)
        elif lender == SEVERAL:
            # A run of this kind refers to consecutive shared rows.
            for position in range(offset // width, (offset + count - 1) // width + 1):
                begin = max(position * width, offset)
                part = min((position + 1) * width, offset + count) - begin
                rows = [
                    self._read_lent(row_map, number, row * width + begin - position * width, part, counts)
                    for number, row in row_map.shared[position]
                ]
                first_byte = (begin - offset) * dtype.size
                target[first_byte : first_byte + part * dtype.size] = _from_float64(
                    sum(rows, np.zeros(part)) / len(rows), dtype
                )
        else:
            lender_index, lender_input = self._find_input(row_map.models[lender])
            if lender_input.tensor.dtype == dtype:
                self._read_elements[lender_index](offset, target)
            else:
                target[:] = _from_float64(self._read_lent(row_map, lender, offset, count), dtype)

    def _read_lent(
        self, row_map: RowMap, lender: int, offset: int, count: int, counts: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Return ``count`` elements of a lender's table from ``offset``, as float64."""
        lender_index, lender_input = self._find_input(row_map.models[lender])
        part = np.empty(count * lender_input.tensor.dtype.size, np.uint8)
        self._read_elements[lender_index](offset, part)
        if counts is not None:
            self._count_for_lender(row_map.models[lender], part, offset, self.numel // len(row_map), counts)
        return _to_float64(part, lender_input.tensor.dtype)

    def _count_for_lender(self, lender: str, part: Bytes, offset: int, width: int, counts: NDArray[np.int64]) -> None:
        """Count the non-finite elements of lent rows for their lender, unless the lender reads those rows itself."""
        index, item = self._find_input(lender)
        dtype = item.tensor.dtype
        if not count_non_finite(part, dtype, fused=False):
            return
        for row in range(offset // width, (offset + len(part) // dtype.size - 1) // width + 1):
            begin = max(row * width, offset) - offset
            piece = part[begin * dtype.size : ((row + 1) * width - offset) * dtype.size]
            # A row that the output also takes from the lender itself is counted when the lender's input is read.
            rows = item.rows
            if rows is not None and not np.any((rows.lender == rows.own) & (rows.row == row)):
                # Copy the row, because its start may not be aligned.
                counts[index] += count_non_finite(piece.copy(), dtype, fused=False)

    def _mean_row(self, index: int, width: int) -> NDArray[np.float64]:
        """Return the mean over all rows of an input's own table. It does not depend on the block size."""
        with self._means_lock:
            if index not in self._means:
                tensor = self.job.inputs[index].tensor
                total, step = np.zeros(width), max(1, PIECE_BYTES // (width * tensor.dtype.size))
                for first in range(0, tensor.shape[0], step):
                    rows = min(step, tensor.shape[0] - first)
                    part = np.empty(rows * width * tensor.dtype.size, np.uint8)
                    self._read_elements[index](first * width, part)
                    total += _to_float64(part, tensor.dtype).reshape(rows, width).sum(0)
                self._means[index] = total / max(tensor.shape[0], 1)
            return self._means[index]

    def _find_input(self, model: str) -> tuple[int, Input]:
        return next((index, item) for index, item in enumerate(self.job.inputs) if item.model == model)


def open_elements(tensor: AnyTensor, files: InputFiles) -> ReadElements:
    """Return a function that reads elements of ``tensor`` from its file, or computes them for a derived tensor."""

    def read(tensor: StoredTensor, first: int, into: Bytes) -> None:
        with files.open(tensor.file) as fd:
            read_into(fd, into.data, tensor.offset + first * tensor.dtype.size, tensor.file)

    return elements_of(tensor, read)


def _to_float64(stored_bytes: Bytes, dtype: DType) -> NDArray[np.float64]:
    import torch

    values: NDArray[np.float64] = torch.from_numpy(stored_bytes).view(getattr(torch, dtype.torch_name)).double().numpy()
    return values


def _from_float64(values: NDArray[np.float64], dtype: DType) -> Bytes:
    import torch

    stored: Bytes = torch.from_numpy(values).to(getattr(torch, dtype.torch_name)).view(torch.uint8).numpy()
    return stored


@dataclass(eq=False)
class LoadedBlock:
    """One block of all inputs of a job, in memory.

    Args:
        inputs: Inputs of the job.
        buffer: Memory of all rows.
        rows: Bytes of each input, then of each importance tensor.
        start: Index of the first element in the tensor.
        length: Number of elements.
        pool: Pool that the buffer came from.
        non_finite: Number of NaN and infinite elements of each row. Zeros if they were not counted.
        constants: Indices and signs of the infinities that :meth:`take_constants` replaced by zero.
    """

    inputs: JobInputs
    buffer: Bytes
    rows: list[Bytes]
    start: int
    length: int
    pool: BufferPool
    non_finite: NDArray[np.int64]
    constants: tuple[NDArray[np.intp], NDArray[np.int8]] | None = None
    _on_device: list[torch.Tensor] = field(default_factory=list)

    def __enter__(self) -> LoadedBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take_constants(self) -> int:
        """Replace infinities that all inputs have in common by zero (see :mod:`.health`), and return their number.

        Tables with lent rows have none, because a lent row is not in all models.
        """
        count = len(self.inputs.job.inputs)
        if any(item.rows is not None for item in self.inputs.job.inputs):
            return 0
        indices, signs = take_constants(self.rows[:count], self.inputs.dtypes[:count])
        if len(indices):
            self.constants = indices, signs
            self.non_finite[:count] -= len(indices)
            self._on_device.clear()
        return len(indices)

    def retain(self) -> bool:
        """Return whether the block may stay in memory until the next pass. If so, that pass calls :meth:`reclaim`."""
        return self.pool.retain(self.buffer)

    def reclaim(self) -> LoadedBlock:
        """Stop counting the block as retained, and return it."""
        self.pool.reclaim(self.buffer)
        return self

    def close(self) -> None:
        self.pool.give(self.buffer)

    def stored_block(self) -> StoredBlock:
        """Return the numbers for fused kernels: as stored if all are bfloat16, else as float32."""
        codes = {dtype.code for dtype in self.inputs.dtypes}
        if codes == {"BF16"} or codes == {"F32"}:
            kind: Any = np.uint16 if codes == {"BF16"} else np.float32
            size = np.dtype(kind).itemsize
            base = self.buffer.__array_interface__["data"][0]
            starts = [(row.__array_interface__["data"][0] - base) // size for row in self.rows]
            numbers_view = self.buffer[: len(self.buffer) // size * size].view(kind)
            return StoredBlock(numbers_view, np.array(starts, np.int64), self.length, self.start, self.inputs.grain)
        widened = [
            numbers(patterns(row, dtype), dtype).astype(np.float32)
            for row, dtype in zip(self.rows, self.inputs.dtypes, strict=True)
        ]
        rows_at = np.arange(len(self.rows), dtype=np.int64) * self.length
        return StoredBlock(np.concatenate(widened), rows_at, self.length, self.start, self.inputs.grain)

    def tiles(self, size: int, device: str, dtype: torch.dtype) -> Iterator[Block]:
        """Yield the block in tiles of up to ``size`` elements, but at least one grain, as ``dtype`` on ``device``."""
        import torch

        grain, count = self.inputs.grain, len(self.inputs.job.inputs)
        step = max(1, size // grain) * grain
        tensors = self.tensors(device)
        for first in range(0, self.length, step):
            parts = [tensor[first : first + step].to(dtype) for tensor in tensors]
            inputs, importance = parts[:count], parts[count:]
            yield Block(torch.stack(inputs), self.start + first, grain, torch.stack(importance) if importance else None)

    def tensors(self, device: str) -> list[torch.Tensor]:
        """Return the rows as tensors in their own formats on ``device``. They are copied only once."""
        import torch

        if self._on_device:
            return self._on_device
        dtypes = [getattr(torch, dtype.torch_name) for dtype in self.inputs.dtypes]
        tensors = [torch.from_numpy(row).view(dtype) for row, dtype in zip(self.rows, dtypes, strict=True)]
        if device == "cpu":
            return tensors
        self._on_device = [tensor.to(device, non_blocking=True) for tensor in tensors]
        return self._on_device

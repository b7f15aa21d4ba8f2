"""Compute one output tensor: run the passes of its merge method over its blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint import DerivedTensor, StoredTensor, numbers, patterns
from mergegate.merge_core.engine.blocks import BufferPool, JobInputs, LoadedBlock, block_size
from mergegate.merge_core.engine.devices import Devices, EngineSettings, SingleThreadedTorch, device_type
from mergegate.merge_core.engine.health import (
    TensorHealth,
    inspect_numbers,
    put_constants,
    require_finite,
    sample_elements,
)
from mergegate.merge_core.engine.input_files import InputPages
from mergegate.merge_core.methods import GRAIN, Fold, Map, Solve, Steps, combine, map_only, mask_key
from mergegate.merge_core.plan import MergePlan, TensorJob

if TYPE_CHECKING:
    from mergegate.merge_core.engine.blocks import Bytes
    from mergegate.merge_core.engine.input_files import InputFiles


@dataclass(frozen=True)
class ComputeContext:
    """Values that all documents of a merge share.

    Args:
        seed: Seed of the random masks.
        devices: Devices that compute.
        settings: Settings of the engine.
        torch: Context whose ``use`` must be called before torch computes a block.
        pages: Manager of the inputs' cached pages. None means that all pages stay cached.
    """

    seed: int
    devices: Devices
    settings: EngineSettings
    torch: SingleThreadedTorch
    pages: InputPages | None = None


@dataclass(frozen=True)
class RunContext:
    """Values that all tensors of a recipe document share.

    Args:
        plan: Plan of the document.
        shared: Values that all documents of the merge share.
        fused: Whether fused kernels compute blocks.
        files: All input files.
        pool: Pool that provides memory.
        submit: Function that lets a thread do some work for a tensor, on the device of the tensor.
        write: Function that writes output. Its arguments are the tensor name, the offset in the tensor, the bytes, and
            ``release`` (see :meth:`.writer.ShardFiles.write`).
        on_finish: Function called with the tensor and its statistics after all of its bytes have been written.
        is_sampled: Whether to measure the root mean squares of the result and of its inputs.
    """

    plan: MergePlan
    shared: ComputeContext
    fused: bool
    files: InputFiles
    pool: BufferPool
    submit: Callable[[TensorRun, Callable[[], None]], None]
    write: Callable[[str, int, memoryview, Callable[[], None] | None], None]
    on_finish: Callable[[TensorRun, TensorHealth], None]
    is_sampled: bool = True


@dataclass(eq=False)
class TensorRun:
    """The computation of one output tensor. Several threads may compute its blocks.

    Args:
        context: Values that all tensors of the document share.
        job: Job of the tensor.
        device: Device that computes the tensor.
        order: Number of the tensor. Work with lower numbers runs first.
        cached_bytes: Number of bytes of each input that are read through the page cache. None: all.
    """

    context: RunContext
    job: TensorJob
    device: str
    order: int
    cached_bytes: int | None = None
    step: Fold | Map | Solve | None = None
    parts: list[Any] = field(default_factory=list)
    retained: dict[int, LoadedBlock] = field(default_factory=dict)  # Blocks in memory for the next pass, by index.
    remaining_blocks: int = 0
    non_finite: int = 0
    nonzero: bool = False
    constants: int = 0  # Number of infinite elements that all inputs have in common.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Divide the tensor into blocks and start the first pass."""
        job, context = self.job, self.context
        grain = context.plan.method.grain(job.output.shape, job.shared) if job.mode == "merge" else GRAIN
        block = block_size(job, grain, context.shared.settings.block_elements)
        if any(isinstance(item.tensor, DerivedTensor) for item in job.inputs):
            context.shared.torch.use()  # Reading derived tensors may need torch.
        self.inputs = JobInputs(job, context.files, block=block, grain=grain, pool=context.pool)
        self.squares = np.zeros(1 + len(job.inputs))
        # Number of NaN and infinite elements of each input and each importance.
        self.non_finite_inputs = np.zeros(len(job.inputs) + len(job.importance), np.int64)
        self.first_pass = True
        self.sample_size = 0
        if self.inputs.count == 0:
            self._finish()
            return
        self.steps = self._steps()
        self._advance(None)

    def _steps(self) -> Steps:
        job, context = self.job, self.context
        if job.mode != "merge":
            return map_only(lambda task: combine([1.0]))(job.task())
        # Steps of one recipe have tensors with the same names, but their masks must differ.
        step = context.plan.recipe.name
        stream = f"{step}: {job.output.name}" if step else job.output.name
        seeds = tuple(mask_key(context.shared.seed, stream, index) for index in range(len(job.inputs)))
        return context.plan.method.steps(job.task(seeds))

    def _advance(self, result: Any) -> None:
        """Send the result of the last pass to the method, and start the pass that the method requests next."""
        self._next_step(result)
        while isinstance(self.step, Solve):
            self.context.shared.torch.use()
            self._next_step(self.step.compute(self.device))
        self.pass_inputs, numbers, eager = self.inputs, list(range(self.inputs.count)), False
        if isinstance(self.step, Fold):
            eager = self.step.eager
            if self.step.sample_count:
                grain = self.inputs.grain
                # Sample pieces of whole grains, spread evenly over the tensor. A small tensor has fewer pieces.
                piece, count = max(1, GRAIN // grain) * grain, self.step.sample_count
                pieces = self.inputs.numel // piece
                numbers = sorted({(2 * index + 1) * pieces // (2 * count) for index in range(count)})
                files, pool = self.context.files, self.context.pool
                self.pass_inputs = JobInputs(self.job, files, block=piece, grain=grain, pool=pool)
        self.parts = [None] * (1 if eager else self.pass_inputs.count)
        self.remaining_blocks = len(numbers)
        for number in numbers[:1] if self._in_order else numbers:
            self.context.submit(self, lambda number=number: self._compute_block(number))  # type: ignore[misc]  # The default argument binds the loop variable.

    def _next_step(self, result: Any) -> None:
        try:
            self.step = self.steps.send(result)
        except StopIteration as stop:
            self.step = stop.value

    @property
    def _in_order(self) -> bool:
        return isinstance(self.step, Fold) and self.step.in_order

    def _compute_block(self, number: int) -> None:
        # After the lock is released below, the thread of the last block may already have started the next pass.
        in_order = self._in_order
        is_full_pass = self.pass_inputs is self.inputs
        first_pass = self.first_pass and is_full_pass
        # On a GPU, :meth:`_check_finite` counts on the device. Integers are always finite.
        check_finite = first_pass and self.job.mode != "equal" and self.device == "cpu"
        retained = self.retained.pop(number, None) if is_full_pass else None
        block = (
            retained.reclaim()
            if retained
            else self.pass_inputs.load(
                number, check_finite=check_finite, fused=self.context.fused, uncached=self._is_uncached(number)
            )
        )
        try:
            # Release the pages that were read. If inputs store elements in another order than the output,
            # :meth:`_finish` releases the pages instead.
            if is_full_pass and (pages := self.context.shared.pages) is not None and self._reads_in_order:
                release = pages.release if isinstance(self.step, Map) else pages.release_until_next_pass
                release(self.job, self.context.files, block.start, block.start + block.length)
            if not retained and not first_pass and (self.constants or not is_full_pass) and self.job.mode != "equal":
                block.take_constants()
            if first_pass and not self._check_finite(block):
                pass  # Do not compute this block: after the last block, the merge is refused with the total count.
            elif isinstance(self.step, Fold):
                self._fold(self.step, number, block)
            elif self.job.mode == "equal":
                for item, row in zip(self.job.inputs[1:], block.rows[1:], strict=True):
                    # One number is a counter, such as the steps of batch normalization: it computes nothing.
                    if self.job.output.numel > 1 and not np.array_equal(row, block.rows[0]):
                        raise self.job.mismatch(item)
                self._write(block.start, block.rows[0], 0, nonzero=True, release=None)
            else:
                assert isinstance(self.step, Map)
                self._map(self.step, block)
        finally:
            if is_full_pass and isinstance(self.step, Fold) and block.retain():
                self.retained[number] = block
            else:
                block.close()
        with self.lock:
            self.remaining_blocks -= 1
            last = self.remaining_blocks == 0
        if not last:
            if in_order:
                self.context.submit(self, lambda: self._compute_block(number + 1))
            return
        if len(self.job.inputs) == 1 and 0 < self.constants < self.inputs.numel:
            self.non_finite_inputs[0] += self.constants  # Only a tensor without finite elements can be a constant.
            self.constants = 0
        require_finite(self.job, self.non_finite_inputs)
        self.first_pass &= not is_full_pass
        if isinstance(self.step, Fold):
            # Free the partial results as soon as they are combined: in a large tensor, they take tens of megabytes.
            parts, self.parts = [part for parts in self.parts if parts is not None for part in parts], []
            result = self.step.combine(parts)
            del parts
            self._advance(result)
        else:
            self._finish()

    def _is_uncached(self, number: int) -> bool:
        if self.cached_bytes is None or not (isinstance(self.step, Map) and self.first_pass):
            return False
        return number * self.inputs.block * min(dtype.size for dtype in self.inputs.dtypes) >= self.cached_bytes

    @cached_property
    def _reads_in_order(self) -> bool:
        return all(item.rows is None and isinstance(item.tensor, StoredTensor) for item in self.job.inputs)

    def _check_finite(self, block: LoadedBlock) -> bool:
        if self.device != "cpu" and self.job.mode != "equal":
            self.context.shared.torch.use()
            import torch

            # Count on the GPU, because the numbers must be copied there anyway.
            sums = [torch.isfinite(tensor).logical_not().sum() for tensor in block.tensors(self.device)]
            block.non_finite += torch.stack(sums).cpu().numpy()
        counts = block.non_finite
        if not counts.any():
            return True
        constants = block.take_constants()
        with self.lock:
            self.constants += constants
            self.non_finite_inputs += counts
        return not counts.any()

    def _fold(self, step: Fold, number: int, block: LoadedBlock) -> None:
        if step.reduce_stored is not None and self._is_fused:
            parts: list[Any] = [step.reduce_stored(block.stored_block())]
        else:
            # Copy the few resulting numbers: keeping their memory, which is between large temporaries of torch, would
            # prevent the reuse of those.
            parts = [step.reduce_block(tile).cpu().numpy().copy() for tile in self._tiles(block)]
        if not step.eager:
            self.parts[number] = parts
            return
        part = step.combine(parts)
        with self.lock:
            self.parts = [[part if self.parts[0] is None else step.combine([self.parts[0][0], part])]]

    def _map(self, step: Map, block: LoadedBlock) -> None:
        output = self.job.output.dtype
        buffer = self.context.pool.take(block.length * output.size)
        merged = buffer[: block.length * output.size]
        if step.map_stored is not None and self._is_fused:
            if output.code in ("BF16", "F32"):
                step.map_stored(block.stored_block(), merged.view(np.uint16 if output.code == "BF16" else np.float32))
            else:
                wide = np.empty(block.length, np.float32)
                step.map_stored(block.stored_block(), wide)
                with np.errstate(over="ignore"):  # Numbers that become infinite are counted.
                    merged.view(np.float16 if output.code == "F16" else np.float64)[:] = wide
            non_finite, nonzero = inspect_numbers(merged, output, fused=True)
        else:
            import torch

            dtype: torch.dtype = getattr(torch, output.torch_name)
            result = torch.cat([step.map_block(tile).to(dtype) for tile in self._tiles(block)])
            non_finite, nonzero = int((~torch.isfinite(result)).sum()), bool(result.any())
            # For a GPU, ``merged`` is pinned memory. Copies to other memory would wait for copies of other threads.
            torch.from_numpy(merged).view(dtype).copy_(result, non_blocking=True)
            if device_type(self.device) == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        if self.context.is_sampled:
            self._sample(block, merged)
        if block.constants is not None:
            put_constants(merged, output, block.constants)
            nonzero = True
        self._write(block.start, merged, non_finite, nonzero, release=lambda: self.context.pool.give(buffer))

    def _sample(self, block: LoadedBlock, merged_bytes: Bytes) -> None:
        """Add a block's sampled elements to the sums of squares of the result and of the inputs."""
        numel = self.job.output.numel
        inputs = list(zip(block.rows, block.inputs.dtypes, strict=True))[: len(self.job.inputs)]
        stored = [(merged_bytes, self.job.output.dtype), *inputs]
        samples = [numbers(sample_elements(patterns(row, dtype), block.start, numel), dtype) for row, dtype in stored]
        squares = [float(np.square(sample, dtype=np.float64).sum()) for sample in samples]
        with self.lock:
            self.squares += squares
            self.sample_size += samples[0].size

    def _tiles(self, block: LoadedBlock) -> Iterator[Any]:
        self.context.shared.torch.use()
        import torch

        size = self.context.shared.settings.tile_elements if self.device == "cpu" else block.length
        dtype = torch.float64 if self.job.arithmetic == "float64" else torch.float32
        return block.tiles(size, self.device, dtype)

    @property
    def _is_fused(self) -> bool:
        return self.context.fused and self.job.arithmetic != "float64"

    def _write(self, start: int, data: Any, non_finite: int, nonzero: bool, release: Callable[[], None] | None) -> None:
        self.context.write(self.job.output.name, start * self.job.output.dtype.size, memoryview(data), release)
        with self.lock:
            self.non_finite += non_finite
            self.nonzero |= nonzero

    def _finish(self) -> None:
        if (pages := self.context.shared.pages) is not None and not self._reads_in_order:
            pages.release(self.job, self.context.files)
        zero = not self.nonzero and self.inputs.count > 0
        rms, *parents = np.sqrt(self.squares / self.sample_size).tolist() if self.sample_size else [0.0]
        self.context.on_finish(self, TensorHealth(self.job.output.name, self.non_finite, zero, rms, tuple(parents)))

"""One tensor while it is computed: which pass it is in, and the results of its blocks so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint import DerivedTensor, StoredTensor, numbers, patterns
from mergegate.merge_core.engine.blocks import BufferPool, JobInputs, LoadedBlock
from mergegate.merge_core.engine.devices import SingleThreadedTorch, device_type
from mergegate.merge_core.engine.finite import look_through, require_finite
from mergegate.merge_core.engine.health import TensorHealth, sampled
from mergegate.merge_core.engine.pages import InputPages
from mergegate.merge_core.engine.settings import EngineSettings
from mergegate.merge_core.methods import (
    GRAIN,
    Fold,
    Map,
    Method,
    Solve,
    Steps,
    StoredBlock,
    combine,
    mask_key,
    sampled_pieces,
)
from mergegate.merge_core.plan import TensorJob

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mergegate.merge_core.engine.blocks import Bytes


@dataclass(frozen=True)
class RunContext:
    """What all tensors of a merge have in common.

    Args:
        method: How they are merged.
        step: Name of the recipe's step, if it has one.
        seed: Of the random masks.
        fused: Whether kernels are fused.
        settings: How to run.
        files: Open file descriptor of every input file.
        torch: To be used before a block is computed with it.
        pool: Where memory comes from.
        submit: (tensor, work): has the work done by one of the threads, on the tensor's device.
        write: (tensor name, first byte, bytes, release): writes to the output, see :meth:`.writer.ShardFiles.write`.
        finished: Called with what was seen when all is written.
        pages: What is left of the inputs in the page cache; None: all of it.
        sampled: Whether the size of the result is compared with that of its inputs, for a warning.
    """

    method: Method
    step: str | None
    seed: int
    fused: bool
    settings: EngineSettings
    files: Mapping[Path, int]
    torch: SingleThreadedTorch
    pool: BufferPool
    submit: Callable[[TensorRun, Callable[[], None]], None]
    write: Callable[[str, int, memoryview, Callable[[], None] | None], None]
    finished: Callable[[TensorRun, TensorHealth], None]
    pages: InputPages | None
    sampled: bool = True


@dataclass(eq=False)
class TensorRun:
    """One output tensor while it is computed; its blocks come from several threads.

    Args:
        context: What it shares with the others.
        job: Which tensor.
        device: Where it is computed.
        order: Of its work among that of others.
    """

    context: RunContext
    job: TensorJob
    device: str
    order: int
    step: Fold | Map | Solve | None = None
    parts: list[Any] = field(default_factory=list)
    kept: dict[int, LoadedBlock] = field(default_factory=dict)  # Blocks that stay for the next pass, by their numbers.
    left: int = 0
    non_finite: int = 0
    nonzero: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Lay out the blocks and start the first pass."""
        job, context = self.job, self.context
        grain = context.method.grain(job.output.shape, job.shared) if job.mode == "merge" else GRAIN
        block = max(1, context.settings.block_elements // grain) * grain
        if any(isinstance(item.tensor, DerivedTensor) for item in job.inputs):
            context.torch.use()  # They may be computed with it while they are read.
        self.inputs = JobInputs(job, context.files, block=block, grain=grain, pool=context.pool)
        self.squares = np.zeros(1 + len(job.inputs))
        # NaN and infinite elements, of each input and of what is read beside them.
        self.broken = np.zeros(len(job.inputs) + len(job.importance), np.int64)
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
            return _copied()
        # Steps of one recipe have tensors of the same names; their masks must not be the same.
        stream = f"{context.step}: {job.output.name}" if context.step else job.output.name
        seeds = tuple(mask_key(context.seed, stream, index) for index in range(len(job.inputs)))
        return context.method.steps(job.task(seeds))

    def _advance(self, result: Any) -> None:
        """Give the last pass's result to the method and start the pass that it wants next."""
        self._next_step(result)
        while isinstance(self.step, Solve):
            self.context.torch.use()
            self._next_step(self.step.of(self.device))
        glance = self.step.glance if isinstance(self.step, Fold) else 0
        self.seen, numbers = self._glanced_at(glance) if glance else (self.inputs, list(range(self.inputs.count)))
        eager = isinstance(self.step, Fold) and self.step.eager
        self.parts = [None] * (1 if eager else self.seen.count)
        self.left = len(numbers)
        for number in numbers[:1] if self._in_order else numbers:
            self.context.submit(self, lambda number=number: self._block(number))  # type: ignore[misc]  # binds the loop

    def _next_step(self, result: Any) -> None:
        try:
            self.step = self.steps.send(result)
        except StopIteration as stop:
            self.step = stop.value

    @property
    def _in_order(self) -> bool:
        return isinstance(self.step, Fold) and self.step.in_order

    def _glanced_at(self, glance: int) -> tuple[JobInputs, list[int]]:
        """The inputs in small pieces, and the numbers of a few."""
        inputs, context = self.inputs, self.context
        piece, numbers = sampled_pieces(inputs.numel, inputs.grain, glance)
        return JobInputs(self.job, context.files, block=piece, grain=inputs.grain, pool=context.pool), numbers

    def _block(self, number: int) -> None:
        whole = self.seen is self.inputs
        first_pass = self.first_pass and whole
        # On a GPU they are looked at there; integers are all finite.
        look = first_pass and self.job.mode != "equal" and self.device == "cpu"
        kept = self.kept.pop(number, None) if whole else None
        block = kept.let_go() if kept else self.seen.load(number, look=look, fused=self.context.fused)
        try:
            if whole:
                self._leave_pages(block)
            if first_pass and not self._is_finite(block):
                pass  # The merge will be refused, with the count of all blocks; nothing is computed from this one.
            elif isinstance(self.step, Fold):
                self._keep(self.step, number, self._fold(self.step, block))
            elif self.job.mode == "equal":
                block.require_equal()
                self._write(block.start, block.rows[0], 0, nonzero=True, release=None)
            else:
                assert isinstance(self.step, Map)
                self._map(self.step, block)
        finally:
            if whole and isinstance(self.step, Fold) and block.keep():
                self.kept[number] = block
            else:
                block.close()
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if not last:
            if self._in_order:
                self.context.submit(self, lambda: self._block(number + 1))
            return
        require_finite(self.job, self.broken)
        self.first_pass &= not whole
        if isinstance(self.step, Fold):
            # Not held beside what is made of them: those of a large tensor are tens of megabytes.
            parts, self.parts = [part for parts in self.parts if parts is not None for part in parts], []
            result = self.step.combine(parts)
            del parts
            self._advance(result)
        else:
            self._finish()

    def _leave_pages(self, block: LoadedBlock) -> None:
        """A block was read. Where its elements lie otherwise in the inputs than in the output, see :meth:`_finish`."""
        pages, last = self.context.pages, block.start + block.length
        if pages is None or not self._plain:
            return
        if isinstance(self.step, Map):
            pages.read(self.job, self.context.files, block.start, last)
        else:
            pages.pass_over(self.job, self.context.files, block.start, last)

    @cached_property
    def _plain(self) -> bool:
        return all(item.rows is None and isinstance(item.tensor, StoredTensor) for item in self.job.inputs)

    def _is_finite(self, block: LoadedBlock) -> bool:
        if self.device != "cpu" and self.job.mode != "equal":
            self.context.torch.use()
            block.look_on(self.device)
        broken = block.non_finite
        if not broken.any():
            return True
        with self.lock:
            self.broken += broken
        return False

    def _keep(self, step: Fold, number: int, parts: list[Any]) -> None:
        if not step.eager:
            self.parts[number] = parts
            return
        part = step.combine(parts)
        with self.lock:
            self.parts = [[part if self.parts[0] is None else step.combine([self.parts[0][0], part])]]

    def _fold(self, step: Fold, block: LoadedBlock) -> list[Any]:
        if step.fused is not None and self._fused:
            return [step.fused(block.stored())]
        # Copied: the few numbers that are kept would otherwise pin torch's memory between its large temporaries, which
        # then cannot be used again.
        return [step.of(tile).cpu().numpy().copy() for tile in self._tiles(block)]

    def _map(self, step: Map, block: LoadedBlock) -> None:
        size = block.length * self.job.output.dtype.size
        buffer = self.context.pool.take(size)
        merged = buffer[:size]
        if step.fused is not None and self._fused:
            non_finite, nonzero = self._map_fused(step.fused, block, merged)
        else:
            non_finite, nonzero = self._map_torch(step, block, merged)
        if self.context.sampled:
            self._sample(block, merged)
        self._write(block.start, merged, non_finite, nonzero, release=lambda: self.context.pool.give(buffer))

    def _map_fused(
        self, fused: Callable[[StoredBlock, Any], None], block: LoadedBlock, merged: Bytes
    ) -> tuple[int, bool]:
        """Fill ``merged``; number of NaN and infinite elements, and whether any element is not zero."""
        code = self.job.output.dtype.code
        if code in ("BF16", "F32"):
            fused(block.stored(), merged.view(np.uint16 if code == "BF16" else np.float32))
        else:
            wide = np.empty(block.length, np.float32)
            fused(block.stored(), wide)
            with np.errstate(over="ignore"):  # What becomes infinite is counted.
                merged.view(np.float16 if code == "F16" else np.float64)[:] = wide
        return look_through(merged, self.job.output.dtype, fused=True)

    def _map_torch(self, step: Map, block: LoadedBlock, merged: Bytes) -> tuple[int, bool]:
        import torch

        dtype: torch.dtype = getattr(torch, self.job.output.dtype.torch_name)
        result = torch.cat([step.of(tile).to(dtype) for tile in self._tiles(block)])
        non_finite, nonzero = int((~torch.isfinite(result)).sum()), bool(result.any())
        # Pinned on a GPU: copies to other memory would wait for those of other threads.
        torch.from_numpy(merged).view(dtype).copy_(result, non_blocking=True)
        if device_type(self.device) == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return non_finite, nonzero

    def _sample(self, block: LoadedBlock, merged: Bytes) -> None:
        """Add to the sums of squares of the result and of its inputs."""
        numel = self.job.output.numel
        own = list(zip(block.rows, block.dtypes, strict=True))[: len(self.job.inputs)]
        stored = [(merged, self.job.output.dtype), *own]
        samples = [numbers(sampled(patterns(row, dtype), block.start, numel), dtype) for row, dtype in stored]
        squares = [float(np.square(sample, dtype=np.float64).sum()) for sample in samples]
        with self.lock:
            self.squares += squares
            self.sample_size += samples[0].size

    def _tiles(self, block: LoadedBlock) -> Iterator[Any]:
        self.context.torch.use()
        import torch

        size = self.context.settings.tile_elements if self.device == "cpu" else block.length
        return block.tiles(size, self.device, torch.float64 if self._wide else torch.float32)

    @property
    def _wide(self) -> bool:
        return self.job.arithmetic == "float64"

    @property
    def _fused(self) -> bool:
        return self.context.fused and not self._wide

    def _write(self, start: int, data: Any, non_finite: int, nonzero: bool, release: Callable[[], None] | None) -> None:
        self.context.write(self.job.output.name, start * self.job.output.dtype.size, memoryview(data), release)
        with self.lock:
            self.non_finite += non_finite
            self.nonzero |= nonzero

    def _finish(self) -> None:
        if self.context.pages is not None and not self._plain:
            self.context.pages.read(self.job, self.context.files)
        zero = not self.nonzero and self.inputs.count > 0
        rms, *parents = np.sqrt(self.squares / max(self.sample_size, 1)).tolist()
        known = self.sample_size > 0
        health = TensorHealth(
            self.job.output.name, self.non_finite, zero, rms if known else 0.0, tuple(parents) if known else ()
        )
        self.context.finished(self, health)


def _copied() -> Steps:
    return combine([1.0])
    yield  # A generator without a fold.

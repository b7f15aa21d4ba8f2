"""One tensor on its way: which pass it is in, and what its blocks have given so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from merge_core.blocks import BufferPool, JobInputs, LoadedBlock
from merge_core.health import TensorHealth, sampled
from merge_core.merge_methods.combination import combine
from merge_core.merge_methods.contract import GRAIN, Fold, Map, Method, Steps, TensorTask
from merge_core.merge_methods.masks import mask_key
from merge_core.plan import TensorJob
from merge_core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch


@dataclass(frozen=True)
class Surroundings:
    """What all tensors of a merge have in common.

    Args:
        method: How they are merged.
        step: Name of the recipe's step, if it has one.
        seed: Of the random masks.
        fused: Whether kernels are fused.
        settings: How to run.
        files: Open file descriptor of every input file.
        pool: Where memory comes from.
        submit: Has work done by one of the threads, on a device.
        write: (tensor name, first byte, bytes): writes to the output.
        finished: Called with what was seen when all is written.
    """

    method: Method
    step: str | None
    seed: int
    fused: bool
    settings: Settings
    files: Mapping[Path, int]
    pool: BufferPool
    submit: Callable[[torch.device, Callable[[], None]], None]
    write: Callable[[str, int, memoryview], None]
    finished: Callable[[TensorRun, TensorHealth], None]


@dataclass(eq=False)
class TensorRun:
    """One output tensor while it is computed; its blocks come from several threads.

    Args:
        around: What it shares with the others.
        job: Which tensor.
        device: Where it is computed.
        resident: Bytes of inputs that stay in memory between passes; 0: they are read again in every pass.
    """

    around: Surroundings
    job: TensorJob
    device: torch.device
    resident: int
    step: Fold | Map | None = None
    parts: list[Any] = field(default_factory=list)
    left: int = 0
    broken: int = 0
    nonzero: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Lay out the blocks and start the first pass."""
        job, around = self.job, self.around
        grain = around.method.grain(job.output.shape, job.shared) if job.mode == "merge" else GRAIN
        block = max(1, around.settings.block_elements // grain) * grain
        self.inputs = JobInputs(
            job, around.files, block=block, grain=grain, pool=around.pool, resident=self.resident > 0
        )
        self.squares = np.zeros(1 + len(job.inputs))
        self.looked_at = 0
        if self.inputs.count == 0:
            self._finish()
            return
        self.steps = self._steps()
        self._advance(None)

    def _steps(self) -> Steps:
        job, around = self.job, self.around
        if job.mode != "merge":
            return _copied()
        # Steps of one recipe have tensors of the same names; their masks must not be the same.
        stream = f"{around.step}: {job.output.name}" if around.step else job.output.name
        return around.method.steps(
            TensorTask(
                name=job.output.name,
                shape=job.output.shape,
                dtype="float64" if self._wide else "float32",
                has_base=job.has_base,
                shared=job.shared,
                per_input=job.per_input,
                seeds=tuple(mask_key(around.seed, stream, index) for index in range(len(job.inputs))),
            )
        )

    def _advance(self, result: Any) -> None:
        """Give the last pass's result to the method and start the pass that it wants next."""
        try:
            self.step = self.steps.send(result)
        except StopIteration as stop:
            self.step = stop.value
        self.parts = [None] * (1 if isinstance(self.step, Fold) and self.step.eager else self.inputs.count)
        self.left = self.inputs.count
        for number in range(self.inputs.count):
            self.around.submit(self.device, lambda number=number: self._block(number))  # type: ignore[misc]  # binds the loop

    def _block(self, number: int) -> None:
        with self.inputs.load(number) as block:
            if isinstance(self.step, Fold):
                self._keep(self.step, number, self._fold(self.step, block))
            elif self.job.mode == "equal":
                block.require_equal()
                self._write(block.start, block.rows[0], 0, nonzero=True)
            else:
                assert self.step is not None
                self._map(self.step, block)
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if not last:
            return
        if isinstance(self.step, Fold):
            self._advance(self.step.combine([part for parts in self.parts for part in parts]))
        else:
            self._finish()

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
        import torch

        code, dtype = self.job.output.dtype.code, getattr(torch, self.job.output.dtype.torch_name)
        # Pinned on a GPU: copies to other memory would wait for those of other threads.
        buffer = self.around.pool.take(block.length * dtype.itemsize)
        merged = torch.from_numpy(buffer[: block.length * dtype.itemsize]).view(dtype)
        if step.fused is not None and self._fused and code in ("BF16", "F32"):
            stored = merged.view(torch.uint16).numpy() if code == "BF16" else merged.numpy()
            step.fused(block.stored(), stored)
            broken, nonzero = _inspect_stored(stored)
        else:
            if step.fused is not None and self._fused:
                wide = np.empty(block.length, np.float32)
                step.fused(block.stored(), wide)
                result = torch.from_numpy(wide).to(dtype)
            else:
                result = torch.cat([step.of(tile).to(dtype) for tile in self._tiles(block)])
            broken, nonzero = int((~torch.isfinite(result)).sum()), bool(result.any())
            merged.copy_(result, non_blocking=True)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        self._look(block, merged)
        self._write(block.start, merged.view(torch.uint8).numpy(), broken, nonzero)
        self.around.pool.give(buffer)

    def _look(self, block: LoadedBlock, merged: torch.Tensor) -> None:
        """Add to the sums of squares of the result and of its inputs."""
        numel, seen = self.job.output.numel, [merged, *block.tensors()]
        samples = [sampled(values, block.start, numel) for values in seen]
        squares = [float(sample.double().square().sum()) for sample in samples]
        with self.lock:
            self.squares += squares
            self.looked_at += samples[0].numel()

    def _tiles(self, block: LoadedBlock) -> Iterator[Any]:
        import torch

        size = self.around.settings.tile_elements if self.device.type == "cpu" else block.length
        return block.tiles(size, self.device, torch.float64 if self._wide else torch.float32)

    @property
    def _wide(self) -> bool:
        return any(item.tensor.dtype.code == "F64" for item in self.job.inputs)

    @property
    def _fused(self) -> bool:
        return self.around.fused and not self._wide

    def _write(self, start: int, data: Any, broken: int, nonzero: bool) -> None:
        self.around.write(self.job.output.name, start * self.job.output.dtype.size, memoryview(data))
        with self.lock:
            self.broken += broken
            self.nonzero |= nonzero

    def _finish(self) -> None:
        self.inputs.release()
        zero = not self.nonzero and self.inputs.count > 0
        size, *parents = np.sqrt(self.squares / max(self.looked_at, 1)).tolist()
        known = self.looked_at > 0
        health = TensorHealth(
            self.job.output.name, self.broken, zero, size if known else 0.0, tuple(parents) if known else ()
        )
        self.around.finished(self, health)


def _inspect_stored(out: Any) -> tuple[int, bool]:
    """Number of NaN and infinite elements, and whether any element is not zero."""
    from merge_core.merge_methods import kernels

    if out.dtype == np.uint16:
        broken, nonzero = kernels.inspect(out, 0x7F80)
    else:
        broken, nonzero = kernels.inspect(out.view(np.uint32), 0x7F800000)
    return int(broken), bool(nonzero)


def _copied() -> Steps:
    return combine([1.0])
    yield  # A generator without a fold.

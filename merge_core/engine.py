"""Running a plan: blocks are read, folded, mapped and written by a few threads, many tensors at a time.

Each thread takes the next block, reads its inputs, computes, and writes the output in place; while one waits for the
disk the others compute, so reading, computing and writing overlap without queues between them. The number of tensors in
work is bounded by a memory budget, whatever their size. Reductions are combined in element order, masks depend on
indices only: the bytes written do not depend on block size, budget or number of threads.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from merge_core import journal
from merge_core.blocks import BufferPool, JobInputs, LoadedBlock
from merge_core.errors import InvalidInput
from merge_core.findings import Finding, worst_first
from merge_core.health import TensorHealth, judge
from merge_core.merge_methods.combination import combine
from merge_core.merge_methods.contract import GRAIN, Fold, Map, Steps, TensorTask
from merge_core.merge_methods.masks import mask_key
from merge_core.output import STEPS, file_names, prepare_directory, write_companions
from merge_core.plan import MergePlan, TensorJob, step_of
from merge_core.writer import ShardFiles

if TYPE_CHECKING:
    import torch

# Below this much input, compiling fused kernels would take longer than it saves.
_FUSE_FROM_BYTES = 256 << 20
_PROGRESS_SECONDS = 0.1


@dataclass(frozen=True)
class Settings:
    """How to run, without influence on the result.

    Args:
        threads: Worker threads; None: two more than there are cores, so that some can wait for the disk.
        block_elements: Elements per block.
        tile_elements: Elements that an unfused CPU computation handles at once, so that they stay in the cache.
        resident_bytes: Memory for tensors that are kept between passes.
        kernels: ``fused``, ``torch``, or ``auto``: fused on a CPU when there is enough to do.
    """

    threads: int | None = None
    block_elements: int = 1 << 20
    tile_elements: int = 1 << 15
    resident_bytes: int = 320 << 20
    kernels: Literal["auto", "fused", "torch"] = "auto"


@dataclass(frozen=True)
class MergeRecord:
    """What a merge did.

    Args:
        method: Name of the merge method.
        tensors: Number of output tensors.
        parameters: Number of output elements.
        bytes_read: Bytes of all inputs.
        bytes_written: Bytes of all output shards.
        files: Name → sha256 of every file in the output directory.
        seconds: Wall-clock time.
        device: Where it was computed.
        bytes_resumed: Output bytes that an interrupted merge had already written.
        findings: What is wrong with the output, worst first.
    """

    method: str
    tensors: int
    parameters: int
    bytes_read: int
    bytes_written: int
    files: Mapping[str, str]
    seconds: float
    device: str
    bytes_resumed: int = 0
    findings: tuple[Finding, ...] = ()


def merge(
    plan: MergePlan,
    out: Path,
    *,
    seed: int = 0,
    device: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
    settings: Settings | None = None,
) -> MergeRecord:
    """Carry out ``plan`` into the directory ``out``.

    Args:
        plan: From :func:`merge_core.plan.plan_merge`.
        out: New or empty directory. ``config.json`` appears in it last: without it the merge did not finish.
        seed: Of the random masks.
        device: ``cpu``, ``cuda``, ``cuda:1``, or ``auto``: a GPU if there is one.
        on_progress: Called in this thread with output bytes done and in all, a few times a second and at the end.
        settings: How to run; has no influence on the result.

    Raises:
        InvalidInput: An input file is not what its header said; integer tensors differ; ``out`` is not empty.
        Refused: The disk is full or fails.
    """
    began = time.monotonic()
    prepare_directory(out, resuming=journal.exists(out), expected=file_names(plan))
    settings = settings or Settings()
    chosen = _device(device)
    parts = (*plan.steps, plan)
    total, done, resumed = sum(part.bytes_written for part in parts), 0, 0
    findings: list[Finding] = []
    digests: dict[str, str] = {}
    with _single_threaded_torch():
        for part in parts:
            last = part is plan
            place = out if last else out / STEPS / str(part.recipe.name)
            place.mkdir(parents=True, exist_ok=True)
            report = None if on_progress is None else _shifted(on_progress, done, total)
            with _open_inputs(part, out / STEPS) as files:
                run = _MergeRun(part, place, seed, chosen, settings, files)
                digests = run.execute(report)
            findings += judge(run.health)
            resumed += run.resumed_bytes
            done += part.bytes_written
            if last:
                digests.update(write_companions(part, place))
    shutil.rmtree(out / STEPS, ignore_errors=True)
    journal.forget(out)
    return MergeRecord(
        method=plan.method.name,
        tensors=len(plan.jobs),
        parameters=plan.parameters,
        bytes_read=sum(part.bytes_read for part in parts),
        bytes_written=total,
        files=dict(sorted(digests.items())),
        seconds=time.monotonic() - began,
        device=str(chosen),
        bytes_resumed=resumed,
        findings=worst_first(findings),
    )


def _shifted(on_progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: on_progress(before + done, total)


class _MergeRun:
    """State that the threads of one merge share."""

    def __init__(
        self,
        plan: MergePlan,
        out: Path,
        seed: int,
        device: torch.device,
        settings: Settings,
        files: Mapping[Path, int],
    ) -> None:
        self.plan, self.seed, self.device, self.settings, self.files = plan, seed, device, settings, files
        self.health: list[TensorHealth] = []
        self.pool = BufferPool(pinned=device.type == "cuda")
        self.fuse = device.type == "cpu" and (
            settings.kernels == "fused" or (settings.kernels == "auto" and plan.bytes_read >= _FUSE_FROM_BYTES)
        )
        self.places = {
            name: (index, offset)
            for index, shard in enumerate(plan.shards)
            for name, offset in zip(shard.tensors, shard.offsets, strict=True)
        }
        self.condition = threading.Condition()
        self.active = 0
        self.resident = 0
        self.failure: BaseException | None = None
        self.threads = settings.threads or _cores() + 2
        way = f"seed {seed}, {device.type}, {'fused' if self.fuse else 'torch'}"
        self.journal, finished = journal.open_journal(out, journal.identity_of(plan, files, way), plan)
        self.health += finished.tensors.values()
        self.jobs = [job for job in plan.jobs if job.output.name not in finished.tensors]
        self.resumed_bytes = sum(j.output.nbytes for j in plan.jobs) - sum(j.output.nbytes for j in self.jobs)
        self.bytes_done = self.resumed_bytes
        try:
            self.output = ShardFiles(
                out,
                plan.shards,
                written=finished.tensors.keys(),
                digests=finished.shards,
                on_complete=self.journal.shard,
            )
        except BaseException:
            self.journal.close()
            raise
        self.executor = ThreadPoolExecutor(self.threads, thread_name_prefix="merge")

    def execute(self, on_progress: Callable[[int, int], None] | None) -> dict[str, str]:
        """Run all jobs; returns file name → sha256 of the shards."""
        try:
            for job in self.jobs:
                self._admit(job, on_progress)
            self._wait(lambda: self.active == 0, on_progress)
            self.executor.shutdown()
            digests = self.output.complete()
        except BaseException as failure:
            self.fail(failure)
            self.executor.shutdown(cancel_futures=True)
            self.output.abandon()
            self.journal.close()
            raise
        self.journal.close()
        if on_progress is not None:
            on_progress(self.plan.bytes_written, self.plan.bytes_written)
        order = {job.output.name: index for index, job in enumerate(self.plan.jobs)}
        self.health.sort(key=lambda item: order[item.name])
        return digests

    def submit(self, work: Callable[[], None]) -> None:
        """Have ``work`` done by one of the threads, unless the merge has failed."""

        def guarded() -> None:
            if self.failure is not None:
                return
            try:
                with _own_stream(self.device):
                    work()
            except BaseException as failure:
                self.fail(failure)

        try:
            self.executor.submit(guarded)
        except RuntimeError:  # The pool is shut down: only after a failure.
            if self.failure is None:
                raise

    def fail(self, failure: BaseException) -> None:
        """Stop everything; the first failure is the one reported."""
        with self.condition:
            if self.failure is None:
                self.failure = failure
            self.condition.notify_all()

    def wrote(self, size: int) -> None:
        """Count output bytes."""
        with self.condition:
            self.bytes_done += size

    def finished(self, health: TensorHealth, resident: int) -> None:
        """A job is done."""
        self.journal.tensor(health)
        with self.condition:
            self.health.append(health)
            self.active -= 1
            self.resident -= resident
            self.condition.notify_all()

    def _admit(self, job: TensorJob, on_progress: Callable[[int, int], None] | None) -> None:
        need = job.nbytes_in if 4 * job.nbytes_in <= 3 * self.settings.resident_bytes else 0
        limit = self.settings.resident_bytes

        def room() -> bool:
            return self.active == 0 or (self.active < 4 * self.threads and self.resident + need <= limit)

        self._wait(room, on_progress)
        with self.condition:
            self.active += 1
            self.resident += need
        running = _JobRun(self, job, need)
        self.submit(running.begin)

    def _wait(self, until: Callable[[], bool], on_progress: Callable[[int, int], None] | None) -> None:
        while True:
            with self.condition:
                self.condition.wait_for(lambda: until() or self.failure is not None, _PROGRESS_SECONDS)
                if self.failure is not None:
                    raise self.failure
                ready, done = until(), self.bytes_done
            if on_progress is not None:
                on_progress(done, self.plan.bytes_written)
            if ready:
                return


@dataclass
class _JobRun:
    """One tensor on its way: which pass it is in, and what its blocks have given so far."""

    run: _MergeRun
    job: TensorJob
    resident: int
    step: Fold | Map | None = None
    parts: list[Any] = field(default_factory=list)
    left: int = 0
    broken: int = 0
    nonzero: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Lay out the blocks and start the first pass."""
        job, settings = self.job, self.run.settings
        grain = self.run.plan.method.grain(job.output.shape, job.shared) if job.mode == "merge" else GRAIN
        block = max(1, settings.block_elements // grain) * grain
        self.inputs = JobInputs(
            job, self.run.files, block=block, grain=grain, pool=self.run.pool, resident=self.resident > 0
        )
        if self.inputs.count == 0:
            self._finish()
            return
        self.steps = self._steps()
        self._advance(None)

    def _steps(self) -> Steps:
        job = self.job
        if job.mode != "merge":
            return _copied()
        # Steps of one recipe have tensors of the same names; their masks must not be the same.
        step = self.run.plan.recipe.name
        stream = f"{step}: {job.output.name}" if step else job.output.name
        return self.run.plan.method.steps(
            TensorTask(
                name=job.output.name,
                shape=job.output.shape,
                dtype="float64" if self._wide else "float32",
                has_base=job.has_base,
                shared=job.shared,
                per_input=job.per_input,
                seeds=tuple(mask_key(self.run.seed, stream, index) for index in range(len(job.inputs))),
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
            self.run.submit(lambda number=number: self._block(number))  # type: ignore[misc]  # default binds the loop

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

        dtype = getattr(torch, self.job.output.dtype.torch_name)
        if step.fused is not None and self._fused:
            out = np.empty(block.length, np.uint16 if self.job.output.dtype.code == "BF16" else np.float32)
            step.fused(block.stored(), out)
            if self.job.output.dtype.code in ("BF16", "F32"):
                self._write(block.start, out.view(np.uint8), *_inspect_stored(out))
                return
            merged = torch.from_numpy(out).to(dtype)
        else:
            merged = torch.cat([step.of(tile).to(dtype) for tile in self._tiles(block)]).cpu()
        finite = torch.isfinite(merged)
        broken = 0 if bool(finite.all()) else int((~finite).sum())
        self._write(block.start, merged.view(torch.uint8).numpy(), broken, bool(merged.any()))

    def _tiles(self, block: LoadedBlock) -> Iterator[Any]:
        import torch

        size = self.run.settings.tile_elements if self.run.device.type == "cpu" else block.length
        return block.tiles(size, self.run.device, torch.float64 if self._wide else torch.float32)

    @property
    def _wide(self) -> bool:
        return any(item.tensor.dtype.code == "F64" for item in self.job.inputs)

    @property
    def _fused(self) -> bool:
        return self.run.fuse and not self._wide

    def _write(self, start: int, data: Any, broken: int, nonzero: bool) -> None:
        shard, offset = self.run.places[self.job.output.name]
        self.run.output.write(shard, offset + start * self.job.output.dtype.size, memoryview(data))
        self.run.wrote(len(data))
        with self.lock:
            self.broken += broken
            self.nonzero |= nonzero

    def _finish(self) -> None:
        self.inputs.release()
        zero = not self.nonzero and self.inputs.count > 0
        self.run.finished(TensorHealth(self.job.output.name, self.broken, zero), self.resident)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput("device", found=f"{name!r}", expected="auto, cpu, cuda, or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput("device", found=f"{name}, which is not there", expected="a CUDA device", remedy="use cpu")
    return device


@contextmanager
def _open_inputs(plan: MergePlan, steps: Path) -> Iterator[dict[Path, int]]:
    files: dict[Path, int] = {}
    try:
        for path in dict.fromkeys(item.tensor.file for job in plan.jobs for item in job.inputs):
            try:
                step = step_of(path)
                real = steps / step / path.name if step else path
                files[path] = os.open(real, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
        yield files
    finally:
        for fd in files.values():
            os.close(fd)


@contextmanager
def _single_threaded_torch() -> Iterator[None]:
    # Parallel over blocks, not inside operations: less waiting, and reductions keep one order.
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_streams = threading.local()


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU each thread has a stream of its own, so copies of one overlap computations of another."""
    if device.type != "cuda":
        yield
        return
    import torch

    if getattr(_streams, "device", None) != device:
        _streams.device = device
        _streams.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
    with torch.cuda.stream(_streams.stream):
        yield
        _streams.stream.synchronize()  # Buffers are used again after this.

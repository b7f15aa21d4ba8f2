"""Execute one recipe document: open its inputs, and let several threads compute the blocks of many tensors.

Each thread takes the next block, reads its inputs, computes, and writes the output in place. While one thread waits for
the disk, the others compute. Most blocks are read again from the page cache in each pass over a tensor, which costs no
more than storing them would. So memory use depends only on the number of threads and the block size. The written bytes
depend on neither, because reductions are combined in element order and masks depend only on indices.

This process claims the output shards one by one, as soon as all tensors of the earlier shards have been started. It
waits for the shards that another participant has claimed until they are complete.
"""

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from mergegate.merge_core.engine import journal
from mergegate.merge_core.engine.blocks import BufferPool, read_ahead, read_ahead_limit
from mergegate.merge_core.engine.devices import own_stream
from mergegate.merge_core.engine.health import TensorHealth
from mergegate.merge_core.engine.input_files import InputFiles
from mergegate.merge_core.engine.tensor_run import ComputeContext, RunContext, TensorRun
from mergegate.merge_core.engine.writer import WAITING_BYTES, ShardFiles
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import Method, has_kernels, record_kernels
from mergegate.merge_core.plan import MergePlan, Shard, TensorJob, step_of

# Input size below which compiling fused kernels takes longer than it saves. Loading them takes less time than torch.
_FUSE_FROM_BYTES = 256 << 20
_PROGRESS_SECONDS = 0.1
# Limit of the memory for blocks that stay until the next pass over their tensor.
RETAINED_BYTES = 32 << 20
# Limit of the pool: retained blocks, results that wait to be hashed, and blocks that are being computed. Above it,
# unused buffers are unmapped before new ones are created.
_POOL_BYTES = RETAINED_BYTES + WAITING_BYTES + (32 << 20)
# Tensors are started until those in progress have at least this many bytes of input. Small tensors are therefore
# started several hundred at a time.
_STARTED_BYTES = 32 << 20
# Limit of the memory that all tensors in progress hold in addition to their blocks. A single tensor may hold more.
HELD_BYTES = 2 << 30


@dataclass(frozen=True)
class ExecutedPlan:
    """Result of :meth:`DocumentRun.execute`.

    Args:
        digests: sha256 of each shard, by file name.
        health: Statistics of every output tensor, in the order of the plan.
        bytes_resumed: Output bytes that an interrupted merge or another participant had already written.
    """

    digests: Mapping[str, str]
    health: tuple[TensorHealth, ...]
    bytes_resumed: int


def require_prepared(plan: MergePlan) -> None:
    """Raise InvalidInput unless all values that the recipe needs before the merge have been computed."""
    for document in (*plan.recipe.steps, plan.recipe):
        mixture, missing = document.mixture, ""
        if document.align_experts and not document.experts_in_order:
            missing = "align_experts: the matching of the experts is missing"
        elif mixture is not None and mixture.needs_prompts and mixture.gates is None:
            missing = f"gate_mode {mixture.gate_mode}: the router rows from the prompts are missing"
        elif document.needs_distances and document.distances is None:
            missing = f"{document.merge_method}: the distances between the models are missing"
        elif document.needs_statistics and document.measured is None:
            missing = f"{document.merge_method}: the statistics of the models on their texts are missing"
        elif document.router_repair is not None and document.repaired is None:
            missing = "router_repair: the new routers are missing"
        if missing:
            raise InvalidInput(
                plan.recipe.location,
                found=missing,
                expected="a recipe whose measurements are complete",
                remedy="use 'mergegate merge' or a profile, which measure first",
            )


def open_inputs(plan: MergePlan, step_file: Callable[[str, str], Path | int]) -> InputFiles:
    """Open the input files of ``plan`` for a ``with`` statement. The steps of the plan must be finished.

    Args:
        plan: Plan of one document.
        step_file: Function that returns the path, or the open descriptor, of a step's result. Its arguments are the
            names of the step and of one of its shards, which may be in a folder.
    """

    def locate(path: Path) -> Path | int:
        step = step_of(path)
        return step_file(step, Path(*path.parts[1:]).as_posix()) if step else path

    return InputFiles((part.file for job in plan.jobs for part in (*job.stored_tensors, *job.measured_tensors)), locate)


def uses_fused_kernels(plan: MergePlan, context: ComputeContext) -> bool:
    """Return whether fused kernels compute ``plan``. The written bytes are the same either way."""
    kernels = context.settings.kernels
    if context.devices.kind != "cpu" or kernels == "torch":
        return False
    if kernels == "fused" or plan.bytes_read >= _FUSE_FROM_BYTES:
        return True
    return "torch" not in sys.modules and has_kernels(_kernel_use(plan))


def _kernel_use(plan: MergePlan) -> str:
    dtypes = {(job.mode, job.output.dtype.code, *(item.tensor.dtype.code for item in job.inputs)) for job in plan.jobs}
    return f"{plan.recipe.merge_method} {sorted(dtypes)}"


def held_bytes(method: Method, job: TensorJob) -> int:
    """Return the number of bytes that the tensor of ``job`` needs in addition to its blocks while it is computed."""
    if job.mode != "merge" or method.costs is None or method.costs.held_bytes is None:
        return 0
    return method.costs.held_bytes(job.task())


def is_read_once(method: Method, job: TensorJob) -> bool:
    """Return whether the tensor of ``job`` is computed in one pass over its inputs."""
    if job.mode != "merge":
        return True
    return method.costs is not None and method.costs.folds(job.task()) == 0


class Workers:
    """A fixed set of threads that run the work of the oldest tensor first.

    So a tensor is mostly finished before the next one starts: its later passes find their data in the page cache, and
    the output is written nearly in order.

    Args:
        thread_count: Number of threads.
        on_failure: Function called with the exception that work raised, in its thread. No more work starts afterward.
    """

    def __init__(self, thread_count: int, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._counter = count()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"merge-{index}", daemon=True) for index in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, order: int, work: Callable[[], None]) -> None:
        """Queue ``work`` after all queued work with a lower or the same ``order``."""
        with self._condition:
            heapq.heappush(self._waiting, (order, next(self._counter), work))
            self._condition.notify()

    def stop(self) -> None:
        """Drop the queued work, and wait until the running work has ended."""
        with self._condition:
            self._stopped = True
            self._waiting.clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                work = heapq.heappop(self._waiting)[2]
            try:
                work()
            except BaseException as failure:
                with self._condition:
                    self._stopped = True
                    self._condition.notify_all()
                self._on_failure(failure)


class DocumentRun:
    """The execution of one recipe document by several worker threads.

    Args:
        plan: Plan of the document. Its steps must be finished.
        directory: Output directory. It must exist.
        context: Values that all documents of the merge share.
        files: All input files.
        on_progress: Function called with the number of finished output bytes, in the thread of :meth:`execute`.
    """

    def __init__(
        self,
        plan: MergePlan,
        directory: Path,
        context: ComputeContext,
        files: InputFiles,
        on_progress: Callable[[int], None],
    ) -> None:
        self._plan, self._directory, self._on_progress = plan, directory, on_progress
        devices, self._settings = context.devices, context.settings
        self._identity = journal.merge_identity(plan, files.identities, f"seed {context.seed}, {devices.kind}")
        # On a GPU, a retained block would also occupy GPU memory.
        retained_bytes = RETAINED_BYTES if devices.kind == "cpu" else 0
        self._context = RunContext(
            plan=plan,
            shared=context,
            fused=uses_fused_kernels(plan, context),
            files=files,
            pool=BufferPool(_POOL_BYTES, pinned=devices.kind == "cuda", retained_bytes=retained_bytes),
            submit=self._submit,
            write=self._write,
            on_finish=self._end_tensor,
        )
        self._jobs = {job.output.name: job for job in plan.jobs}
        self._locations = {
            name: (shard, offset)
            for shard in plan.shards
            for name, offset in zip(shard.tensors, shard.offsets, strict=True)
        }
        self._claims: dict[str, journal.ShardJournal] = {}
        self._condition = threading.Condition()
        self._load = dict.fromkeys(devices.all, 0)  # Input bytes of the tensors in progress, by device.
        self._started = self._tensors = self._held_bytes = 0
        self._failure: BaseException | None = None
        self._bytes_done = self._resumed = 0
        self._output = ShardFiles(directory, keep_pages=self._settings.keep_output)
        self._workers = Workers(self._settings.workers, self._fail)

    def execute(self) -> ExecutedPlan:
        """Write all shards into the directory, and wait for those that other participants write."""
        try:
            remaining = list(self._plan.shards)
            while remaining:
                remaining = [shard for shard in remaining if not self._claim(shard)]
                self._wait(lambda: self._tensors == 0)
                if remaining:
                    time.sleep(_PROGRESS_SECONDS)  # Another participant has claimed them and may finish or die.
            self._workers.stop()
            self._output.close()
            self._output.check()
        except BaseException as failure:
            self._fail(failure)
            self._workers.stop()
            self._output.close(abandon=True)
            raise
        finally:
            for claimed in self._claims.values():
                claimed.close()
            self._context.pool.close()
        self._on_progress(self._plan.bytes_written)
        if self._context.fused and "torch" not in sys.modules:  # Otherwise, this merge may need torch as well.
            record_kernels(_kernel_use(self._plan))
        health_by_name = {name: health for claimed in self._claims.values() for name, health in claimed.tensors.items()}
        return ExecutedPlan(
            digests={name: str(claimed.digest) for name, claimed in self._claims.items()},
            health=tuple(health_by_name[job.output.name] for job in self._plan.jobs),
            bytes_resumed=self._resumed,
        )

    def _claim(self, shard: Shard) -> bool:
        """Start all unfinished tensors of ``shard``. Return False if another participant has claimed the shard."""
        claimed = journal.claim(self._directory, shard, self._identity)
        if claimed is None:
            return False
        self._claims[shard.name] = claimed
        resumed = sum(self._jobs[name].output.nbytes for name in claimed.tensors)
        with self._condition:
            self._resumed += resumed
            self._bytes_done += resumed
        if claimed.digest is None:
            self._output.open(shard, finished_names=claimed.tensors.keys(), on_complete=claimed.record_digest)
            for name in shard.tensors:
                if name not in claimed.tensors:
                    self._start(self._jobs[name])
        return True

    def _start(self, job: TensorJob) -> None:
        """Start a tensor when there is room for it (see :meth:`_has_room`)."""
        extra_bytes = held_bytes(self._plan.method, job)
        if not self._has_room(_STARTED_BYTES, extra_bytes):
            self._wait(lambda: self._has_room(_STARTED_BYTES // 2, extra_bytes))
        pages = self._context.shared.pages
        bypasses = pages is not None and pages.admit(job, self._context.files) and is_read_once(self._plan.method, job)
        with self._condition:
            order = self._started
            self._started += 1
            self._tensors += 1
            self._held_bytes += extra_bytes
            device = min(self._load, key=lambda device: self._load[device])
            self._load[device] += job.nbytes_in
            # Until the first tensor is finished, the kernels may still have to be loaded, so the disk works ahead.
            ahead_bytes = read_ahead_limit(job) if self._tensors == self._started or not bypasses else 0
        run = TensorRun(self._context, job, device, order, ahead_bytes if bypasses else None)
        self._submit(run, run.begin)
        read_ahead(job, self._context.files, ahead_bytes)

    def _submit(self, run: TensorRun, work: Callable[[], None]) -> None:
        def work_on_stream() -> None:
            with own_stream(run.device):
                work()

        self._workers.submit(run.order, work_on_stream)

    def _fail(self, failure: BaseException) -> None:
        """Wake up the main thread, which raises the first failure."""
        with self._condition:
            if self._failure is None:
                self._failure = failure
            self._condition.notify_all()

    def _write(self, name: str, start: int, data: memoryview, release: Callable[[], None] | None) -> None:
        shard, offset = self._locations[name]
        self._output.write(shard.name, offset + start, data, release)
        with self._condition:
            self._bytes_done += len(data)

    def _end_tensor(self, run: TensorRun, health: TensorHealth) -> None:
        self._claims[self._locations[health.name][0].name].record_tensor(health)
        with self._condition:
            self._tensors -= 1
            self._load[run.device] -= run.job.nbytes_in
            self._held_bytes -= held_bytes(self._plan.method, run.job)
            if self._has_room(_STARTED_BYTES // 2, 0):
                self._condition.notify_all()

    def _has_room(self, threshold: int, extra_bytes: int) -> bool:
        """Return whether another tensor, which needs ``extra_bytes`` in addition to its blocks, may be started.

        If there are already two tensors per worker, their inputs must have less than ``threshold`` bytes.
        """
        with self._condition:
            if extra_bytes and self._held_bytes and self._held_bytes + extra_bytes > HELD_BYTES:
                return False
            return self._tensors < 2 * self._settings.workers or sum(self._load.values()) < threshold

    def _wait(self, condition: Callable[[], bool]) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: condition() or self._failure is not None, _PROGRESS_SECONDS)
                if self._failure is not None:
                    raise self._failure
                is_ready, bytes_done = condition(), self._bytes_done
            self._output.check()
            self._on_progress(bytes_done)
            if is_ready:
                return

"""Running one recipe document: blocks are read, folded, mapped and written by a few threads, many tensors at a time.

Each thread takes the next block, reads its inputs, computes, and writes the output in place; while one waits for the
disk the others compute, so reading, computing and writing overlap without queues between them. Nothing is kept between
the passes over a tensor: its blocks are read again, from the page cache, which costs no more than keeping them would.
So memory depends on the number of threads and the size of a block only. Reductions are combined in element order, masks
depend on indices only: the bytes written do not depend on block size or number of threads.

Output shards are claimed one by one, as soon as there is nothing more to begin in those before; shards that another
participant has claimed are watched until they are complete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.engine import journal
from mergegate.merge_core.engine.blocks import BufferPool, read_ahead
from mergegate.merge_core.engine.devices import Devices, SingleThreadedTorch, own_stream
from mergegate.merge_core.engine.health import TensorHealth
from mergegate.merge_core.engine.pages import InputPages
from mergegate.merge_core.engine.settings import EngineSettings
from mergegate.merge_core.engine.tensor_run import RunContext, TensorRun
from mergegate.merge_core.engine.workers import Workers
from mergegate.merge_core.engine.writer import WAITING_BYTES, ShardFiles
from mergegate.merge_core.methods import Method
from mergegate.merge_core.plan import MergePlan, Shard, TensorJob

# Below this much input, compiling fused kernels would take longer than it saves.
_FUSE_FROM_BYTES = 256 << 20
_PROGRESS_SECONDS = 0.1
# Blocks that stay in memory until the next pass over their tensor.
KEPT_BYTES = 32 << 20
# These, results that wait for being hashed, and blocks in work: what of it lies unused goes when another is wanted.
_POOL_BYTES = KEPT_BYTES + WAITING_BYTES + (32 << 20)
# Inputs of tensors that have been begun, at least: of small ones many are, so that whoever begins them is woken once
# for hundreds.
_BEGUN_BYTES = 32 << 20
# What tensors in work may hold beside their blocks, all together; a single one may hold more.
HELD_BYTES = 2 << 30


@dataclass(frozen=True)
class ExecutedPlan:
    """What has been written.

    Args:
        digests: File name → sha256 of the shards.
        health: What was seen of every tensor, in the order of the plan.
        found: Output bytes that others had written: an interrupted merge, or another participant.
    """

    digests: Mapping[str, str]
    health: tuple[TensorHealth, ...]
    found: int


def execute(
    plan: MergePlan,
    place: Path,
    *,
    seed: int,
    devices: Devices,
    settings: EngineSettings,
    files: Mapping[Path, int],
    pages: InputPages | None,
    torch: SingleThreadedTorch,
    on_progress: Callable[[int], None] | None,
) -> ExecutedPlan:
    """Write all shards of ``plan`` into ``place``, together with all other participants.

    Args:
        plan: One document; its steps are done.
        place: Directory, exists.
        seed: Of the random masks.
        devices: Where to compute.
        settings: How to run.
        files: Open file descriptor of every input file.
        pages: What is left of them in the page cache; None: all of it.
        torch: To be used before a block is computed with it.
        on_progress: Called in this thread with the output bytes done.
    """
    return _Run(plan, place, seed, devices, settings, files, pages, torch, on_progress).execute()


def uses_fused_kernels(plan: MergePlan, devices: Devices, settings: EngineSettings) -> bool:
    """Whether kernels are compiled for ``plan``; the bytes are the same either way."""
    worth_it = settings.kernels == "auto" and plan.bytes_read >= _FUSE_FROM_BYTES
    return devices.kind == "cpu" and (settings.kernels == "fused" or worth_it)


def held_bytes(method: Method, job: TensorJob) -> int:
    """What a tensor holds while it is in work, beside its blocks."""
    if job.mode != "merge" or method.costs is None or method.costs.held is None:
        return 0
    return method.costs.held(job.task())


class _Run:
    """State that the threads of one merge share."""

    def __init__(
        self,
        plan: MergePlan,
        place: Path,
        seed: int,
        devices: Devices,
        settings: EngineSettings,
        files: Mapping[Path, int],
        pages: InputPages | None,
        torch: SingleThreadedTorch,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._plan, self._place, self._settings, self._on_progress = plan, place, settings, on_progress
        fused = uses_fused_kernels(plan, devices, settings)
        way = f"seed {seed}, {devices.kind}, {'fused' if fused else 'torch'}"
        self._identity = journal.merge_identity(plan, files, way)
        # On a GPU what a block has there would stay as well.
        kept = KEPT_BYTES if devices.kind == "cpu" else 0
        self._context = RunContext(
            method=plan.method,
            step=plan.recipe.name,
            seed=seed,
            fused=fused,
            settings=settings,
            files=files,
            torch=torch,
            pool=BufferPool(_POOL_BYTES, pinned=devices.kind == "cuda", kept=kept),
            submit=self._submit,
            write=self._write,
            finished=self._finished,
            pages=pages,
        )
        self._jobs = {job.output.name: job for job in plan.jobs}
        self._at = {
            name: (shard, offset)
            for shard in plan.shards
            for name, offset in zip(shard.tensors, shard.offsets, strict=True)
        }
        self._claims: dict[str, journal.ShardJournal] = {}
        self._condition = threading.Condition()
        self._load = dict.fromkeys(devices.all, 0)  # Bytes of inputs in work.
        self._begun = self._tensors = self._held = 0
        self._failure: BaseException | None = None
        self._done = self._found = 0
        self._output = ShardFiles(place, keep_pages=settings.keep_output)
        self._workers = Workers(settings.workers, self._fail)

    def execute(self) -> ExecutedPlan:
        try:
            left = list(self._plan.shards)
            while left:
                left = [shard for shard in left if not self._claim(shard)]
                self._wait(lambda: self._tensors == 0)
                if left:
                    time.sleep(_PROGRESS_SECONDS)  # Another participant has them, and may finish them or die.
            self._workers.stop()
            self._output.complete()
        except BaseException as failure:
            self._fail(failure)
            self._workers.stop()
            self._output.abandon()
            raise
        finally:
            for claimed in self._claims.values():
                claimed.close()
            self._context.pool.close()
        if self._on_progress is not None:
            self._on_progress(self._plan.bytes_written)
        seen = {name: health for claimed in self._claims.values() for name, health in claimed.tensors.items()}
        return ExecutedPlan(
            digests={name: str(claimed.digest) for name, claimed in self._claims.items()},
            health=tuple(seen[job.output.name] for job in self._plan.jobs),
            found=self._found,
        )

    def _claim(self, shard: Shard) -> bool:
        """Begin all that is left of ``shard``; False when another participant has it."""
        claimed = journal.claim(self._place, shard, self._identity)
        if claimed is None:
            return False
        self._claims[shard.name] = claimed
        found = sum(self._jobs[name].output.nbytes for name in claimed.tensors)
        with self._condition:
            self._found += found
            self._done += found
        if claimed.digest is None:
            self._output.open(shard, written=claimed.tensors.keys(), on_complete=claimed.hashed)
            for name in shard.tensors:
                if name not in claimed.tensors:
                    self._admit(self._jobs[name])
        return True

    def _admit(self, job: TensorJob) -> None:
        """Begin a tensor as soon as few are in work: enough that no thread waits while one of them ends."""
        held = held_bytes(self._plan.method, job)
        if not self._has_room(_BEGUN_BYTES, held):
            self._wait(lambda: self._has_room(_BEGUN_BYTES // 2, held))
        with self._condition:
            order = self._begun
            self._begun += 1
            self._tensors += 1
            self._held += held
            device = min(self._load, key=lambda device: self._load[device])
            self._load[device] += job.nbytes_in
        run = TensorRun(self._context, job, device, order)
        if self._context.pages is not None:
            self._context.pages.admit(job, self._context.files)
        self._submit(run, run.begin)
        read_ahead(job, self._context.files)

    def _submit(self, run: TensorRun, work: Callable[[], None]) -> None:
        def on_its_stream() -> None:
            with own_stream(run.device):
                work()

        self._workers.submit(run.order, on_its_stream)

    def _fail(self, failure: BaseException) -> None:
        """Stop everything; the first failure is the one reported."""
        with self._condition:
            if self._failure is None:
                self._failure = failure
            self._condition.notify_all()

    def _write(self, name: str, start: int, data: memoryview, release: Callable[[], None] | None) -> None:
        shard, offset = self._at[name]
        self._output.write(shard.name, offset + start, data, release)
        with self._condition:
            self._done += len(data)

    def _finished(self, run: TensorRun, health: TensorHealth) -> None:
        self._claims[self._at[health.name][0].name].tensor(health)
        with self._condition:
            self._tensors -= 1
            self._load[run.device] -= run.job.nbytes_in
            self._held -= held_bytes(self._plan.method, run.job)
            if self._has_room(_BEGUN_BYTES // 2, 0):
                self._condition.notify_all()

    def _has_room(self, least: int, held: int) -> bool:
        """Whether another tensor, which holds ``held`` bytes beside its blocks, may be begun while those that are have
        ``least`` bytes of input or more."""
        with self._condition:
            if held and self._held and self._held + held > HELD_BYTES:
                return False
            return self._tensors < 2 * self._settings.workers or sum(self._load.values()) < least

    def _wait(self, until: Callable[[], bool]) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: until() or self._failure is not None, _PROGRESS_SECONDS)
                if self._failure is not None:
                    raise self._failure
                ready, done = until(), self._done
            self._output.check()
            if self._on_progress is not None:
                self._on_progress(done)
            if ready:
                return

"""A merge that stays in memory: the tensors that :func:`.engine.merge_weights` would write, one after another.

The same plan, the same passes over the same blocks, the same checks of what is read and of what comes out; only the
bytes go into a tensor instead of into a file, so they are the same bytes. What is left out is what files need: places
for shards, their hashes, journals. For candidates of a search, whose network is in memory already::

    for name, tensor in merge_tensors(plan_merge(recipe, checkpoints)):
        network.state_dict()[name].copy_(tensor)

Inputs are read from their files block by block, so that several processes share them in the page cache, and memory is
that of one tensor for each thread. Only the results of steps (recipes of several documents) are held whole until the
end, in files without a name, because later documents read them like any other input.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mergegate.merge_core.architecture.experts import DiskTensor
from mergegate.merge_core.engine.blocks import BufferPool
from mergegate.merge_core.engine.devices import SingleThreadedTorch, choose_devices, own_stream
from mergegate.merge_core.engine.execution import uses_fused_kernels
from mergegate.merge_core.engine.health import TensorHealth, judge_health
from mergegate.merge_core.engine.inputs import open_inputs, require_prepared
from mergegate.merge_core.engine.settings import EngineSettings
from mergegate.merge_core.engine.tensor_run import RunContext, TensorRun
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.files import disk_refusal
from mergegate.merge_core.plan import MergePlan, TensorJob
from mergegate.merge_core.system import nameless_file

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.engine.blocks import Bytes

_POOL_BYTES = 64 << 20


def merge_tensors(
    plan: MergePlan,
    *,
    seed: int = 0,
    device: str = "cpu",
    settings: EngineSettings | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Carry out ``plan`` in memory.

    While the iteration is not over (or closed), torch computes on one thread, as in every merge.

    Args:
        plan: From :func:`merge_core.plan.plan_merge`.
        seed: Of the random masks.
        device: Where it is computed; the tensors are on the CPU.
        settings: How to run; has no influence on the result. ``threads`` absent: one, this one; several compute
            as many tensors ahead.
        names: Only these tensors, in this order; absent: all, in the order of the files.

    Yields:
        Name, and tensor in the format of the file, on the CPU; it is nobody else's.

    Raises:
        InvalidInput: The recipe asks for what has not been prepared; an input file is not what its header said; it
            holds NaN or infinity; integer tensors differ; ``names`` has one that the plan does not make.
        ChangedInput: An input file was changed or replaced while it was read.
        Refused: A tensor that came out is not healthy (NaN, infinity, nothing but zeros); the plan does not balance
            (an input tensor without a place); there is no memory for steps.
    """
    require_prepared(plan)
    _require_sound(plan.findings)
    settings = settings or EngineSettings()
    with SingleThreadedTorch() as single, ExitStack() as held:
        made: dict[tuple[str, str], int] = {}  # (step, shard): descriptor of its result
        for step in plan.steps:
            with open_inputs(step, lambda step, name: made[step, name]) as files:
                run = _Run(step, seed, device, settings, files, single)
                _keep(step, run.tensors(_stored(step, None)), made, held)
        with open_inputs(plan, lambda step, name: made[step, name]) as files:
            run = _Run(plan, seed, device, settings, files, single)
            for tensor, merged in run.tensors(_stored(plan, names)):
                yield tensor.name, _shaped(tensor, merged)


def _stored(plan: MergePlan, names: Sequence[str] | None) -> list[DiskTensor]:
    every = {tensor.name: tensor for shard in plan.shards for tensor in shard.stored}
    if names is None:
        return list(every.values())
    if unknown := next((name for name in names if name not in every), None):
        raise InvalidInput(plan.recipe.where, found=f"no tensor {unknown}", expected="names of tensors that it makes")
    return [every[name] for name in names]


def _keep(
    step: MergePlan,
    tensors: Iterator[tuple[DiskTensor, Bytes]],
    made: dict[tuple[str, str], int],
    held: ExitStack,
) -> None:
    """Put the result of a step where later documents read it: each tensor at its place in its shard."""
    places: dict[str, tuple[int, int]] = {}
    for shard in step.shards:
        fd = nameless_file("step")
        held.callback(os.close, fd)
        made[str(step.recipe.name), shard.name] = fd
        places |= {name: (fd, offset) for name, offset in zip(shard.tensors, shard.offsets, strict=True)}
    for tensor, merged in tensors:
        fd, offset = places[tensor.pieces[0]]
        done = 0
        while done < len(merged):
            try:
                done += os.pwrite(fd, merged[done:].data, offset + done)
            except OSError as error:
                raise disk_refusal(error, Path(f"memory for {step.recipe.name}")) from None


def _shaped(tensor: DiskTensor, merged: Bytes) -> torch.Tensor:
    import torch

    return torch.from_numpy(merged).view(getattr(torch, tensor.dtype.torch_name)).reshape(tensor.shape)


@dataclass(eq=False)
class _Run:
    """One recipe document while it is carried out.

    Args:
        plan: Its plan.
        seed: Of the random masks.
        device: Where to compute.
        settings: How to run.
        files: Descriptors of its input files.
        single: To be used before a block is computed with torch.
    """

    plan: MergePlan
    seed: int
    device: str
    settings: EngineSettings
    files: Mapping[Path, int]
    single: SingleThreadedTorch
    _into: dict[str, Bytes] = field(default_factory=dict)  # of each job that is computed now, where its bytes go

    def __post_init__(self) -> None:
        devices = choose_devices(self.device)
        self._where = devices.all[0]
        self._jobs = {job.output.name: job for job in self.plan.jobs}
        self._context = RunContext(
            method=self.plan.method,
            step=self.plan.recipe.name,
            seed=self.seed,
            fused=uses_fused_kernels(self.plan, devices, self.settings),
            settings=self.settings,
            files=self.files,
            torch=self.single,
            pool=BufferPool(_POOL_BYTES, pinned=devices.kind == "cuda"),
            submit=_at_once,
            write=self._write,
            pages=None,
            finished=self._look_at,
            sampled=False,
        )

    def tensors(self, wanted: Sequence[DiskTensor]) -> Iterator[tuple[DiskTensor, Bytes]]:
        """Each of ``wanted`` with its bytes, in that order."""
        threads = min(self.settings.threads or 1, len(wanted))
        if threads < 2:
            for tensor in wanted:
                yield tensor, self._computed(tensor)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="merge") as pool:
            ahead: deque[tuple[DiskTensor, Future[Bytes]]] = deque()
            try:
                for tensor in wanted:
                    if len(ahead) == threads:
                        first, future = ahead.popleft()
                        yield first, future.result()
                    ahead.append((tensor, pool.submit(self._computed, tensor)))
                while ahead:
                    first, future = ahead.popleft()
                    yield first, future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _computed(self, tensor: DiskTensor) -> Bytes:
        merged = np.empty(tensor.nbytes, np.uint8)
        begin = 0
        for name in tensor.pieces:
            job = self._jobs[name]
            self._compute(job, merged[begin : begin + job.output.nbytes])
            begin += job.output.nbytes
        return merged

    def _compute(self, job: TensorJob, into: Bytes) -> None:
        self._into[job.output.name] = into
        with own_stream(self._where):
            TensorRun(self._context, job, self._where, 0).begin()
        del self._into[job.output.name]

    def _write(self, name: str, start: int, data: memoryview, release: Callable[[], None] | None) -> None:
        self._into[name][start : start + data.nbytes] = np.frombuffer(data, np.uint8)
        if release is not None:
            release()

    def _look_at(self, run: TensorRun, health: TensorHealth) -> None:
        may_zero = self.plan.method.traits.may_zero
        if health.zero and not may_zero and not run.context.sampled:
            # Whether its inputs were zero as well decides: how large they are is looked at only now.
            TensorRun(replace(run.context, sampled=True), run.job, run.device, run.order).begin()
            return
        _require_sound(judge_health([health], may_zero=may_zero))


def _require_sound(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.severity == "block":
            raise finding.refusal()


def _at_once(_: TensorRun, work: Callable[[], None]) -> None:
    """The blocks of a tensor come one after another; the last one begins the next pass."""
    work()

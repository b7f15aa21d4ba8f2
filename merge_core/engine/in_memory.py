"""Merge in memory: yield the tensors that :func:`.engine.merge_weights` would write, one after another.

The computation, the checks and the resulting bytes are the same, but there are no shards, hashes and journals. Use it
to try many recipes on a network that is already in memory::

    for name, tensor in merge_tensors(plan_merge(recipe, checkpoints)):
        network.state_dict()[name].copy_(tensor)

Inputs are read from their files block by block, so several processes share them in the page cache. Each thread needs
memory for one output tensor. The results of a recipe's steps are stored in unnamed files until the end.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mergegate.merge_core.architecture.experts import DiskTensor
from mergegate.merge_core.engine.blocks import BufferPool
from mergegate.merge_core.engine.devices import EngineSettings, SingleThreadedTorch, choose_devices, own_stream
from mergegate.merge_core.engine.execution import open_inputs, require_prepared, uses_fused_kernels
from mergegate.merge_core.engine.health import TensorHealth, judge_health
from mergegate.merge_core.engine.tensor_run import ComputeContext, RunContext, TensorRun
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.files import disk_refusal
from mergegate.merge_core.plan import MergePlan
from mergegate.merge_core.system import nameless_file

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.engine.blocks import Bytes
    from mergegate.merge_core.engine.input_files import InputFiles

_POOL_BYTES = 64 << 20


def merge_tensors(
    plan: MergePlan,
    *,
    seed: int = 0,
    device: str = "cpu",
    settings: EngineSettings | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Execute ``plan``, and yield the name and value of each output tensor. The tensors are on the CPU.

    Until the iterator is exhausted or closed, torch is limited to one thread.

    Args:
        plan: Plan from :func:`merge_core.plan.plan_merge`.
        seed: Seed of the random masks.
        device: Device that computes.
        settings: Settings of the engine. Without ``threads``, the calling thread computes one tensor at a time. With
            ``threads``, as many tensors are computed in advance.
        names: Names of the tensors to compute, in this order. Default: all, in the order of the files.

    Raises:
        InvalidInput: The recipe needs a preparation that is missing, an input file does not match its header or has NaN
            or infinity, integer tensors differ, or the plan has no tensor of a name in ``names``.
        ChangedInput: An input file was changed or replaced while it was read.
        Refused: A result is not healthy (NaN, infinity, or only zeros), or the plan does not use an input tensor.
        DiskUnavailable: There is not enough memory for steps.
    """
    import torch

    require_prepared(plan)
    _require_no_blocking(plan.findings)
    with SingleThreadedTorch() as single_threaded, ExitStack() as stack:
        context = ComputeContext(seed, choose_devices(device), settings or EngineSettings(), single_threaded)
        descriptors: dict[tuple[str, str], int] = {}  # Results by (step, shard).
        for step in plan.steps:
            with open_inputs(step, lambda step, name: descriptors[step, name]) as files:
                run = _Run(step, context, files)
                # Store the result for later documents: each tensor at its offset in its shard.
                locations: dict[str, tuple[int, int]] = {}
                for shard in step.shards:
                    fd = nameless_file("step")
                    stack.callback(os.close, fd)
                    descriptors[str(step.recipe.name), shard.name] = fd
                    locations |= {name: (fd, offset) for name, offset in zip(shard.tensors, shard.offsets, strict=True)}
                for tensor, merged in run.tensors(_select_tensors(step, None)):
                    fd, offset = locations[tensor.pieces[0]]
                    written_bytes = 0
                    while written_bytes < len(merged):
                        try:
                            written_bytes += os.pwrite(fd, merged[written_bytes:].data, offset + written_bytes)
                        except OSError as error:
                            raise disk_refusal(error, Path(f"memory for {step.recipe.name}")) from None
        with open_inputs(plan, lambda step, name: descriptors[step, name]) as files:
            run = _Run(plan, context, files)
            for tensor, merged in run.tensors(_select_tensors(plan, names)):
                dtype: torch.dtype = getattr(torch, tensor.dtype.torch_name)
                yield tensor.name, torch.from_numpy(merged).view(dtype).reshape(tensor.shape)


def _select_tensors(plan: MergePlan, names: Sequence[str] | None) -> list[DiskTensor]:
    available = {tensor.name: tensor for shard in plan.shards for tensor in shard.stored}
    if names is None:
        return list(available.values())
    if unknown := next((name for name in names if name not in available), None):
        raise InvalidInput(plan.recipe.location, found=f"no tensor {unknown}", expected="names of tensors of the merge")
    return [available[name] for name in names]


@dataclass(eq=False)
class _Run:
    """The execution of one recipe document."""

    plan: MergePlan
    shared: ComputeContext
    files: InputFiles
    _targets: dict[str, Bytes] = field(default_factory=dict)  # Output bytes of each job in progress.

    def __post_init__(self) -> None:
        self._device = self.shared.devices.all[0]
        self._jobs = {job.output.name: job for job in self.plan.jobs}
        self._context = RunContext(
            plan=self.plan,
            shared=self.shared,
            fused=uses_fused_kernels(self.plan, self.shared),
            files=self.files,
            pool=BufferPool(_POOL_BYTES, pinned=self.shared.devices.kind == "cuda"),
            submit=lambda _, work: work(),  # Compute the blocks one after another in the calling thread.
            write=self._write,
            on_finish=self._check_health,
            is_sampled=False,
        )

    def tensors(self, selected_tensors: Sequence[DiskTensor]) -> Iterator[tuple[DiskTensor, Bytes]]:
        threads = min(self.shared.settings.threads or 1, len(selected_tensors))
        if threads < 2:
            for tensor in selected_tensors:
                yield tensor, self._compute_tensor(tensor)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="merge") as pool:
            ahead: deque[tuple[DiskTensor, Future[Bytes]]] = deque()
            try:
                for tensor in selected_tensors:
                    if len(ahead) == threads:
                        first, future = ahead.popleft()
                        yield first, future.result()
                    ahead.append((tensor, pool.submit(self._compute_tensor, tensor)))
                while ahead:
                    first, future = ahead.popleft()
                    yield first, future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _compute_tensor(self, tensor: DiskTensor) -> Bytes:
        merged = np.empty(tensor.nbytes, np.uint8)
        begin = 0
        for name in tensor.pieces:
            job = self._jobs[name]
            self._targets[name] = merged[begin : begin + job.output.nbytes]
            with own_stream(self._device):
                TensorRun(self._context, job, self._device, 0).begin()
            del self._targets[name]
            begin += job.output.nbytes
        return merged

    def _write(self, name: str, start: int, data: memoryview, release: Callable[[], None] | None) -> None:
        self._targets[name][start : start + data.nbytes] = np.frombuffer(data, np.uint8)
        if release is not None:
            release()

    def _check_health(self, run: TensorRun, health: TensorHealth) -> None:
        may_zero = self.plan.method.traits.may_zero
        if health.zero and not may_zero and not run.context.is_sampled:
            # A tensor of zeros is wrong unless the inputs are zero too. Repeat the merge to measure their size.
            TensorRun(replace(run.context, is_sampled=True), run.job, run.device, run.order).begin()
            return
        _require_no_blocking(judge_health([health], may_zero=may_zero))


def _require_no_blocking(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.severity == "block":
            raise finding.refusal()

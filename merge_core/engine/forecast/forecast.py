"""Forecast the memory, disk space and time of a planned merge from the rates of a machine.

::

    needs = estimate_needs(plan, EngineSettings(), cores=8, device="cpu")
    time = duration(needs, measure_machine(files, out, cores=8), cores=8)

The time is a range, because it depends on how far reading, computing and writing overlap. The lower bound is the time
of the slowest of the three, if data that is read again comes from memory. The upper bound is their sum, if data of
large tensors that is read again comes from the disk. Both assume that no input is cached and that the output is flushed
to the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.merge_core.architecture import is_projection
from mergegate.merge_core.engine import HELD_BYTES, RETAINED_BYTES, WAITING_BYTES, block_size
from mergegate.merge_core.methods import GRAIN, Method, TensorTask
from mergegate.merge_core.plan import MergePlan, TensorJob, step_of

if TYPE_CHECKING:
    from mergegate.merge_core.engine import EngineSettings

# Anonymous memory of the process before the first tensor, by device: interpreter, torch and compiled kernels.
_PROCESS_BYTES = {"cpu": 256 << 20, "cuda": 640 << 20}
# Temporary memory of a GPU computation, in float32 copies of its block.
_GPU_TEMPORARIES = 4
_JOURNAL_BYTES_PER_TENSOR = 200
# Size of the largest tensor that stays in the page cache between its passes on any machine.
_CACHED_BYTES = 1 << 30
# Units per input element of a method without declared costs, which is assumed to need one fold.
_ASSUMED_UNITS = 3.0 + 5.0
# Units per element to copy a tensor that only one model has.
_COPY_UNITS = 0.6


@dataclass(frozen=True)
class Rates:
    """Speed of a machine per second, from :func:`merge_core.engine.forecast.probe.measure_machine`.

    Args:
        read: Bytes read from the disk of the inputs.
        write: Bytes written and flushed to the disk of the output.
        copy: Bytes copied between a program and the page cache by all cores.
        hash: Bytes hashed with sha256 by one core.
        units: Units of arithmetic (see :class:`merge_core.methods.Costs`) computed by all cores.
        same_disk: Whether inputs and output share one disk.
        measured_at: Time of the measurement, in seconds since 1970.
        bus: Bytes copied between main memory and GPU. 0 without a GPU.
        products: Operations in large float32 matrix products by all cores, for example when a model processes text. 0
            if not measured.
    """

    read: float
    write: float
    copy: float
    hash: float
    units: float
    same_disk: bool
    measured_at: float
    bus: float = 0.0
    products: float = 0.0


@dataclass(frozen=True)
class Needs:
    """Resources that a merge will need, from :func:`estimate_needs`. All numbers include the steps of the recipe.

    Args:
        device: ``cpu`` or ``cuda``.
        tensors: Number of output tensors.
        parameters: Number of parameters of the merged model, without steps.
        input_files: Number of weight files that are read.
        shards: Number of output weight files.
        bytes_read: Bytes of all inputs, each counted once.
        bytes_read_again: Bytes read in all passes except the first over each tensor.
        bytes_from_disk_again: Part of ``bytes_read_again`` that may have left the page cache since the first pass.
        bytes_passed: Bytes read in all passes.
        bytes_written: Bytes of all output weights.
        passes: Maximum number of passes over one tensor.
        read_again: Number of tensors that may have left the page cache between passes.
        units: Units of arithmetic (see :class:`merge_core.methods.Costs`).
        products: Operations in float64 matrix products and decompositions, for methods that work on matrices.
        held_bytes: Peak memory of the tensors in progress in addition to their blocks.
        block: Bytes of the largest block in main memory.
        gpu_block: Bytes of the largest block on a GPU, including temporary values.
        memory: Peak of anonymous main memory, in bytes.
        gpu_memory: Peak of GPU memory, in bytes. 0 on a CPU.
        disk: Peak bytes on the disk of the output: weights, results of steps, other files and journals.
        assumed_cost: Names of the methods whose costs are assumed, not measured.
    """

    device: str
    tensors: int
    parameters: int
    input_files: int
    shards: int
    bytes_read: int
    bytes_read_again: int
    bytes_from_disk_again: int
    bytes_passed: int
    bytes_written: int
    passes: int
    read_again: int
    units: float
    block: int
    gpu_block: int
    memory: int
    gpu_memory: int
    disk: int
    assumed_cost: tuple[str, ...] = ()
    products: float = 0.0
    held_bytes: int = 0


@dataclass(frozen=True)
class Duration:
    """Forecast time of a merge, in seconds.

    Args:
        reading: Time to read the inputs once from the disk.
        reading_again: Time to read tensors from the disk again that may have left the page cache.
        writing: Time to write the output to the disk.
        computing: Time of all cores for arithmetic and copies in memory.
        hashing: Time of one core for the sha256 of the output.
        at_least: Lower bound of the total time (see the module docstring).
        at_most: Upper bound of the total time.
    """

    reading: float
    reading_again: float
    writing: float
    computing: float
    hashing: float
    at_least: float
    at_most: float


def estimate_needs(
    plan: MergePlan, settings: EngineSettings, *, cores: int, device: str, companion_bytes: int = 0
) -> Needs:
    """Return the resources that the merge of ``plan`` will need on ``device`` (``cpu``, ``cuda`` or ``cuda:1``).

    ``companion_bytes`` is the size of all output files other than the weights.
    """
    kind = device.partition(":")[0]
    parts = (*plan.steps, plan)
    kinds = [kind for part in parts for kind in _kinds(part)]
    repeated = [kind for kind in kinds if kind.work.passes > 1]
    evicted = [kind for kind in repeated if kind.job.nbytes_in > _CACHED_BYTES]
    threads = settings.workers_on(cores)
    # The engine computes either one tensor that exceeds the limit, or as many tensors as fit into it.
    together = sum(kind.count * kind.work.held_bytes for kind in kinds)
    held_bytes = max(min(HELD_BYTES, together), max((kind.work.held_bytes for kind in kinds), default=0))
    block = max((_block_bytes(kind, settings, 0) for kind in kinds), default=0)
    gpu_block = max((_block_bytes(kind, settings, 4 * _GPU_TEMPORARIES) for kind in kinds), default=0)
    tensors, written = sum(kind.count for kind in kinds), sum(part.bytes_written for part in parts)
    return Needs(
        device=kind,
        tensors=tensors,
        parameters=plan.parameters,
        input_files=len(input_files(plan)),
        shards=sum(len(part.shards) for part in parts),
        bytes_read=sum(part.bytes_read for part in parts),
        bytes_read_again=sum(kind.nbytes_in * kind.work.folds for kind in repeated),
        bytes_from_disk_again=sum(kind.nbytes_in * kind.work.folds for kind in evicted),
        bytes_passed=sum(kind.nbytes_in * kind.work.passes for kind in kinds),
        bytes_written=written,
        passes=max((kind.work.passes for kind in kinds), default=0),
        read_again=sum(kind.count for kind in evicted),
        units=sum(kind.count * kind.job.output.numel * len(kind.job.inputs) * kind.work.units for kind in kinds),
        block=block,
        gpu_block=gpu_block,
        memory=peak_memory(block, threads=threads, device=kind, held_bytes=held_bytes),
        gpu_memory=threads * gpu_block if kind == "cuda" else 0,
        disk=written + companion_bytes + _JOURNAL_BYTES_PER_TENSOR * tensors,
        assumed_cost=tuple(sorted({kind.plan.recipe.merge_method for kind in kinds if not kind.work.is_measured})),
        products=sum(kind.count * kind.work.products for kind in kinds),
        held_bytes=held_bytes,
    )


def peak_memory(block: int, *, threads: int, device: str, held_bytes: int = 0) -> int:
    """Return the peak of the anonymous main memory of a merge, in bytes.

    ``block`` is the size of the largest block, and ``held_bytes`` the memory of tensors in addition to their blocks.
    """
    return _PROCESS_BYTES[device.partition(":")[0]] + RETAINED_BYTES + WAITING_BYTES + threads * block + held_bytes


def duration(needs: Needs, rates: Rates, *, cores: int) -> Duration:
    """Forecast the time of a merge on a machine with these rates and ``cores`` cores."""
    reading, writing = needs.bytes_read / rates.read, needs.bytes_written / rates.write
    again, hashing = needs.bytes_from_disk_again / rates.read, needs.bytes_written / rates.hash
    # Every input byte is copied from the disk to the page cache and from there to this process, and every output byte
    # the other way round. Bytes that are read again are only copied from the page cache.
    moved = 2 * needs.bytes_read + needs.bytes_read_again + 2 * needs.bytes_written
    computing = moved / rates.copy
    if needs.device == "cpu":
        computing += needs.units / rates.units
        # In float64 a product takes twice as long as in float32.
        computing += 2 * needs.products / rates.products if rates.products else 0.0
    elif rates.bus:
        # Blocks cross the bus in every pass. Arithmetic on a GPU is faster than the bus.
        computing += (needs.bytes_passed + needs.bytes_written) / rates.bus
    processor = computing + hashing / cores
    disk = reading + writing if rates.same_disk else max(reading, writing)
    return Duration(
        reading=reading,
        reading_again=again,
        writing=writing,
        computing=computing,
        hashing=hashing,
        at_least=max(disk, processor, hashing),
        at_most=reading + again + writing + processor,
    )


def input_files(plan: MergePlan) -> list[Path]:
    """Return the weight files that a merge reads, except for the results of its own steps."""
    parts = (*plan.steps, plan)
    files = dict.fromkeys(tensor.file for part in parts for job in part.jobs for tensor in job.stored_tensors)
    return [file for file in files if step_of(file) is None]


@dataclass(frozen=True)
class Work:
    """Amount of work for one output tensor.

    Args:
        folds: Maximum number of passes over all inputs before the last pass.
        units: Units of arithmetic per input element in all passes together.
        is_measured: Whether the method declares measured costs. If not, costs are assumed.
        products: Operations in float64 matrix products and decompositions.
        held_bytes: Memory that the tensor needs in addition to its blocks.
    """

    folds: int
    units: float
    is_measured: bool = True
    products: float = 0.0
    held_bytes: int = 0

    @property
    def passes(self) -> int:
        """Number of passes over the inputs, including the last pass."""
        return self.folds + 1


def work_of(method: Method, task: TensorTask) -> Work:
    """Return the amount of work that ``method`` needs for one tensor."""
    costs = method.costs
    if costs is None:
        return Work(1, _ASSUMED_UNITS, is_measured=False)
    folds = costs.folds(task)
    products = costs.products(task) if costs.products else 0.0
    held_bytes = costs.held_bytes(task) if costs.held_bytes else 0
    return Work(folds, folds * costs.fold + costs.map, products=products, held_bytes=held_bytes)


@dataclass(frozen=True)
class _Kind:
    """``count`` jobs that need the same ``work``, such as ``job``. A mixture has tens of thousands of jobs."""

    plan: MergePlan
    job: TensorJob
    work: Work
    count: int

    @property
    def nbytes_in(self) -> int:
        """Input bytes of all jobs."""
        return self.count * self.job.nbytes_in


def _kinds(plan: MergePlan) -> Iterator[_Kind]:
    jobs_by_kind: dict[tuple[object, ...], list[TensorJob]] = {}
    costs = plan.method.costs
    is_of_matrices = costs is not None and costs.held_bytes is not None
    for job in plan.jobs:
        # Compare values by identity, which is fast. Equal values are mostly the same object, see
        # ``plan.job_builder``. If not, there is one more kind.
        inputs = tuple((item.tensor.dtype.code, item.tensor.shape) for item in job.inputs)
        output, values = (job.output.dtype.code, job.output.shape), (id(job.shared), id(job.per_input))
        diagonal = tuple(item.moments.is_diagonal if item.moments else None for item in job.inputs)
        matrix = (is_projection(job.output.name), diagonal) if is_of_matrices else ()
        importance_count = len(job.importance)
        jobs_by_kind.setdefault((output, inputs, values, job.mode, job.has_base, matrix, importance_count), []).append(
            job
        )
    for jobs in jobs_by_kind.values():
        work = work_of(plan.method, jobs[0].task()) if jobs[0].mode == "merge" else Work(0, _COPY_UNITS)
        yield _Kind(plan, jobs[0], work, len(jobs))


def _block_bytes(kind: _Kind, settings: EngineSettings, further: int) -> int:
    """Return the bytes of one block of a job: inputs, output, and ``further`` bytes per input element."""
    job = kind.job
    grain = kind.plan.method.grain(job.output.shape, job.shared) if job.mode == "merge" else GRAIN
    elements = min(block_size(job, grain, settings.block_elements), job.output.numel)
    inputs = sum(item.tensor.dtype.size + further for item in job.inputs) + (4 + further) * len(job.importance)
    return elements * (inputs + 4 + job.output.dtype.size)

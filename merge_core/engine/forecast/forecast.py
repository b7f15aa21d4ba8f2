"""What a planned merge will need, before it starts: bytes, memory, disk and time.

Pure: a plan and rates in, numbers out::

    needs = needs_of(plan, Settings(), cores=8, device="cpu")
    time = duration(needs, measure(files, out, cores=8))

Time is a range, because how much of reading, computing and writing overlaps is not known before. At least: all of it,
so the slowest of them counts, and what is read again comes from memory. At most: none of it, their sum, and what is
read again comes from the disk when the tensor is a large one. Both assume a cold cache, and a result that must reach
the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.merge_core.architecture import is_projection
from mergegate.merge_core.engine import HELD_BYTES, KEPT_BYTES, WAITING_BYTES
from mergegate.merge_core.engine.forecast.work import COPY, Work, work_of
from mergegate.merge_core.methods import GRAIN
from mergegate.merge_core.plan import MergePlan, TensorJob, step_of

if TYPE_CHECKING:
    from mergegate.merge_core.engine import EngineSettings

# Anonymous memory of the process before the first tensor: interpreter, torch, compiled kernels.
_PROCESS_BYTES = {"cpu": 256 << 20, "cuda": 640 << 20}
# Temporaries of a GPU computation, in float32 copies of its block.
_GPU_TEMPORARIES = 4
_JOURNAL_BYTES_PER_TENSOR = 200
# What the page cache of any machine keeps between the passes over one tensor.
_CACHED_BYTES = 1 << 30


@dataclass(frozen=True)
class Rates:
    """What a machine can do; from :func:`merge_core.engine.forecast.probe.measure`. All per second.

    Args:
        read: Bytes from the disk that holds the inputs.
        write: Bytes to the disk that holds the output, until they are safe there.
        copy: Bytes between programs and the system's page cache, all cores together.
        hash: Bytes of one sha256.
        units: Units of arithmetic (see :class:`merge_core.methods.Costs`), all cores together.
        same_disk: Whether reading and writing share one disk.
        measured_at: Seconds since 1970.
        bus: Bytes between memory and GPU; 0 without one.
        products: Operations of a large matrix product in float32, all cores together: what a model that is asked does
            most of the time. 0: not measured.
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
    """What a merge will need, on any machine.

    Args:
        device: ``cpu`` or ``cuda``.
        tensors: Output tensors, those of steps included.
        parameters: Of the result.
        input_files: Weight files that are read.
        shards: Output files, those of steps included.
        bytes_read: Bytes of all inputs, each counted once.
        bytes_read_again: Bytes of further passes, wherever they come from.
        bytes_from_disk_again: Those of them that may have left the page cache by then.
        bytes_passed: Bytes of all passes over inputs, wherever they come from.
        bytes_written: Bytes of all output weights, those of steps included.
        passes: Most passes over one tensor.
        read_again: How many tensors may have left the page cache between passes.
        units: Arithmetic, see :class:`merge_core.methods.Costs`.
        products: Operations of matrix products and decompositions in float64, of methods that work on matrices.
        held: Bytes that tensors in work hold beside their blocks, all together, at the peak.
        block: Bytes of the largest block of one thread, in memory.
        gpu_block: The same on a GPU, with what is computed from it.
        memory: Peak of anonymous memory, in bytes.
        gpu_memory: Peak of GPU memory, in bytes; 0 on a CPU.
        disk: Bytes on the output's disk: weights (a partial file becomes the final one, so they count once), results
            of steps until the end, companions, journal.
        assumed_cost: Methods whose cost is assumed, not measured.
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
    held: int = 0


@dataclass(frozen=True)
class Duration:
    """Seconds of a merge, and what they are made of.

    Args:
        reading: The inputs once, from the disk.
        reading_again: Further passes over tensors that may have left the page cache.
        writing: The output, to the disk.
        computing: Arithmetic and copies in memory, on all cores.
        hashing: sha256 of the output, on one core.
        at_least, at_most: The whole, see the module docstring.
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
    """What ``plan`` will need.

    Args:
        plan: From :func:`merge_core.plan.plan_merge`.
        settings: How the engine will run.
        cores: Cores that it may use.
        device: ``cpu``, ``cuda``, ``cuda:1``.
        companion_bytes: Of the files that come with the weights.
    """
    kind = device.partition(":")[0]
    parts = (*plan.steps, plan)
    kinds = [kind for part in parts for kind in _kinds(part)]
    again = [kind for kind in kinds if kind.work.passes > 1]
    gone = [kind for kind in again if kind.job.nbytes_in > _CACHED_BYTES]
    threads = settings.workers_on(cores)
    held = _held(kinds)
    block = max((_block_bytes(kind, settings, 0) for kind in kinds), default=0)
    gpu = max((_block_bytes(kind, settings, 4 * _GPU_TEMPORARIES) for kind in kinds), default=0)
    tensors, written = sum(kind.count for kind in kinds), sum(part.bytes_written for part in parts)
    return Needs(
        device=kind,
        tensors=tensors,
        parameters=plan.parameters,
        input_files=len(input_files(plan)),
        shards=sum(len(part.shards) for part in parts),
        bytes_read=sum(part.bytes_read for part in parts),
        bytes_read_again=sum(kind.nbytes_in * kind.work.folds for kind in again),
        bytes_from_disk_again=sum(kind.nbytes_in * kind.work.folds for kind in gone),
        bytes_passed=sum(kind.nbytes_in * kind.work.passes for kind in kinds),
        bytes_written=written,
        passes=max((kind.work.passes for kind in kinds), default=0),
        read_again=sum(kind.count for kind in gone),
        units=sum(kind.count * kind.job.output.numel * len(kind.job.inputs) * kind.work.units for kind in kinds),
        block=block,
        gpu_block=gpu,
        memory=peak_memory(block, threads=threads, device=kind, held=held),
        gpu_memory=threads * gpu if kind == "cuda" else 0,
        disk=written + companion_bytes + _JOURNAL_BYTES_PER_TENSOR * tensors,
        assumed_cost=tuple(sorted({kind.plan.recipe.merge_method for kind in kinds if not kind.work.known})),
        products=sum(kind.count * kind.work.products for kind in kinds),
        held=held,
    )


def peak_memory(block: int, *, threads: int, device: str, held: int = 0) -> int:
    """Bytes of anonymous memory at the peak of a merge whose largest block has ``block`` bytes, and whose tensors in
    work hold ``held`` beside their blocks."""
    return _PROCESS_BYTES[device.partition(":")[0]] + KEPT_BYTES + WAITING_BYTES + threads * block + held


def _held(kinds: Sequence[_Kind]) -> int:
    """The largest alone, or several until there is no room for one more (see ``engine.execution``)."""
    together = sum(kind.count * kind.work.held for kind in kinds)
    return max(min(HELD_BYTES, together), max((kind.work.held for kind in kinds), default=0))


def duration(needs: Needs, rates: Rates, *, cores: int) -> Duration:
    """How long a merge will take on a machine of these rates with ``cores`` cores."""
    reading, writing = needs.bytes_read / rates.read, needs.bytes_written / rates.write
    again, hashing = needs.bytes_from_disk_again / rates.read, needs.bytes_written / rates.hash
    # Every byte goes from the disk to the page cache and from there to us, and back so; what is read again only goes
    # the second half of the way.
    moved = 2 * needs.bytes_read + needs.bytes_read_again + 2 * needs.bytes_written
    computing = moved / rates.copy
    if needs.device == "cpu":
        computing += needs.units / rates.units
        # In float64 a product takes twice as long as in float32.
        computing += 2 * needs.products / rates.products if rates.products else 0.0
    elif rates.bus:
        # Blocks cross the bus in every pass. Arithmetic on a GPU is faster than that.
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
    """The weight files that a merge reads, results of its own steps not among them."""
    parts = (*plan.steps, plan)
    named = dict.fromkeys(tensor.file for part in parts for job in part.jobs for tensor in job.stored)
    return [file for file in named if step_of(file) is None]


@dataclass(frozen=True)
class _Kind:
    """Jobs that differ in names and places alone: a mixture has tens of thousands, of a few kinds.

    Args:
        plan: Theirs.
        job: One of them.
        work: Of each.
        count: How many there are.
    """

    plan: MergePlan
    job: TensorJob
    work: Work
    count: int

    @property
    def nbytes_in(self) -> int:
        """Bytes of the inputs of all of them."""
        return self.count * self.job.nbytes_in


def _kinds(plan: MergePlan) -> Iterator[_Kind]:
    found: dict[tuple[object, ...], list[TensorJob]] = {}
    costs = plan.method.costs
    is_of_matrices = costs is not None and costs.held is not None
    for job in plan.jobs:
        # Values by identity: equal ones are mostly the same object (see ``plan.values``), and else a kind more.
        inputs = tuple((item.tensor.dtype.code, item.tensor.shape) for item in job.inputs)
        output, values = (job.output.dtype.code, job.output.shape), (id(job.shared), id(job.per_input))
        seen = tuple(item.moments.is_diagonal if item.moments else None for item in job.inputs)
        matrix = (is_projection(job.output.name), seen) if is_of_matrices else ()
        beside = len(job.importance)
        found.setdefault((output, inputs, values, job.mode, job.has_base, matrix, beside), []).append(job)
    for alike in found.values():
        yield _Kind(plan, alike[0], _work(plan, alike[0]), len(alike))


def _work(plan: MergePlan, job: TensorJob) -> Work:
    if job.mode != "merge":
        return COPY
    return work_of(plan.method, job.task())


def _block_bytes(kind: _Kind, settings: EngineSettings, further: int) -> int:
    """Bytes of one block of a job: its inputs, its output, and ``further`` bytes per input element."""
    job = kind.job
    grain = kind.plan.method.grain(job.output.shape, job.shared) if job.mode == "merge" else GRAIN
    elements = min(max(1, settings.block_elements // grain) * grain, job.output.numel)
    inputs = sum(item.tensor.dtype.size + further for item in job.inputs) + (4 + further) * len(job.importance)
    return elements * (inputs + 4 + job.output.dtype.size)

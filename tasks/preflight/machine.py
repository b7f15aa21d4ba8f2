"""Compare this machine with the needs of a run: disk, memory and GPU memory; and predict how long the run takes.

Every run repeats the check. It refuses anything that cannot work before a download starts. Anything that may not work
is only a warning in ``mergegate check``, because other programs may end before the run.

The prediction for a machine without an earlier run uses sizes, documents, tokens and a benchmark, and is good to a
factor of three. After a first run, its measured duration replaces the prediction. The model assumes that an evaluation
computes two operations for each parameter and token. To generate, it also reads all weights for each token. Small
models spend most of their time between the matrix products, so the prediction adds a constant per call and per request.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.engine.forecast import Rates
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.system import Capacity, system_memory
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.base.stage import home, nearest_directory
from mergegate.tasks.models.checkpoints import ResolvedCheckpoint, gpu_memory
from mergegate.tasks.preflight.compatibility import Compatibility

_SPARE = 1.1  # Multiple of the known need, because file systems reserve some space.
# Multiple of the weights in memory, for activations, the logits of a batch, and libraries.
_TO_EVALUATE = 1.3
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # Bytes per parameter.


@dataclass(frozen=True)
class Disk:
    """Disk that a run writes to: a directory on it, free bytes, and bytes to write by description of the data."""

    directory: Path
    free: int
    writes: Mapping[str, int]


@dataclass(frozen=True)
class Machine:
    """Resources of a machine: cores for the merge, disks that the run writes to, and memory.

    ``memory`` is None if the system does not report it. ``gpu`` is the memory of the GPU that the merge uses, or None
    on a CPU.
    """

    cores: int
    disks: tuple[Disk, ...]
    memory: Capacity | None
    gpu: Capacity | None = None


def measure_machine_capacity(
    compatibility: Compatibility, parents: Sequence[ResolvedCheckpoint], device: str, variant_bytes: int = 0
) -> Machine:
    """Return the resources of this machine for a merge of ``parents`` on ``device`` (``cpu``, ``cuda``, ``cuda:N``).

    ``variant_bytes`` is the size of all quantized variants of the merge.
    """
    from mergegate.merge_core.system import cores_of_process

    snapshots = {snapshot.directory: snapshot for parent in parents for snapshot in parent.snapshots}
    writes = [(home(), "the merged checkpoint", compatibility.disk)]
    downloads = {directory: snapshot.bytes_to_download for directory, snapshot in snapshots.items()}
    writes += [(home(), "its quantized variants", variant_bytes)] if variant_bytes else []
    writes += [(directory, "weights from the Hub", count) for directory, count in downloads.items() if count]
    # The project and the cache of the Hub may be on the same disk.
    disks: dict[int, Disk] = {}
    for directory, purpose, count in writes:
        existing = nearest_directory(directory)
        device_id = existing.stat().st_dev
        disk = disks.get(device_id) or Disk(existing, shutil.disk_usage(existing).free, {})
        total = disk.writes.get(purpose, 0) + count
        disks[device_id] = Disk(disk.directory, disk.free, {**disk.writes, purpose: total})
    gpu = gpu_memory(device) if device != "cpu" else None
    return Machine(cores=cores_of_process(), disks=tuple(disks.values()), memory=system_memory(), gpu=gpu)


def machine_findings(
    compatibility: Compatibility, machine: Machine, *, device: str, dtypes: Sequence[str] = ()
) -> tuple[Finding, ...]:
    """Return findings about resources that ``machine`` lacks for the merge and for the evaluation of its models.

    ``dtypes`` are the formats in which the models are evaluated (``auto``, ``bfloat16``, ``float16``, ``float32``). If
    there are none, the models are not evaluated.
    """
    if compatibility.blocking():  # The needs of a blocked merge are unknown.
        return ()
    return tuple(_findings(compatibility, machine, device, dtypes))


def _findings(compatibility: Compatibility, machine: Machine, device: str, dtypes: Sequence[str]) -> Iterator[Finding]:
    from mergegate.merge_core.engine import EngineSettings
    from mergegate.merge_core.engine.forecast import peak_memory

    for disk in machine.disks:
        needed = round(_SPARE * sum(disk.writes.values()))
        if disk.free < needed:
            parts = " and ".join(f"{format_bytes(count)} for {why}" for why, count in disk.writes.items() if count)
            yield Finding(
                severity="block",
                where=str(disk.directory),
                found=f"{format_bytes(disk.free)} free",
                expected=f"{format_bytes(needed)}: {parts}, and a reserve of 10 %",
                remedy="free some space, or point MERGEGATE_HOME or HF_HOME to a larger disk",
            )
    threads = EngineSettings().workers_on(machine.cores)
    merging = peak_memory(compatibility.block, threads=threads, device=device, held_bytes=compatibility.held)
    yield from _memory_shortage("memory", machine.memory, merging, "merge on a machine with more memory")
    if machine.gpu:
        on_gpu = threads * compatibility.gpu_block
        yield from _memory_shortage(f"memory of {device}", machine.gpu, on_gpu, "set merge: {device: cpu}")
    largest = {"auto": compatibility.largest_bytes}
    largest |= {dtype: width * compatibility.largest_parameters for dtype, width in _WIDTH.items()}
    evaluating = round(_TO_EVALUATE * max((largest.get(dtype, largest["auto"]) for dtype in dtypes), default=0))
    capacity = machine.gpu or machine.memory
    if capacity and capacity.available < evaluating:
        yield Finding(
            severity="warn",
            where=f"memory of {device}" if machine.gpu else "memory",
            found=f"{format_bytes(capacity.available)} available",
            expected=f"about {format_bytes(evaluating)} to evaluate the largest model",
            remedy="evaluate with dtype: bfloat16, on a larger machine, or with a server as backend",
        )


def _memory_shortage(location: str, capacity: Capacity | None, needed_bytes: int, remedy: str) -> Iterator[Finding]:
    if capacity is None or capacity.available >= needed_bytes:
        return
    is_permanent = capacity.total < needed_bytes
    size, when = (capacity.total, "in total") if is_permanent else (capacity.available, "available now")
    yield Finding(
        severity="block" if is_permanent else "warn",
        where=location,
        found=f"{format_bytes(size)} {when}",
        expected=f"about {format_bytes(needed_bytes)} for merging",
        remedy=remedy if is_permanent else "stop other programs first",
    )


# Share of the speed of a large matrix product that a network reaches, including all work between its products.
_REACHED = 0.6
# Operations that a GPU computes in the time it takes to move one byte of its own memory (A100, H100: 160 to 210).
_OPERATIONS_A_BYTE = 200.0
# Seconds outside the matrix products: per call, per tensor of the model in a call, and per request.
_CALL, _TENSOR, _REQUEST = 2e-3, 1e-4, 2e-4
_LOADING = 0.1  # Seconds to load a model, in addition to reading its bytes.
STARTING = 3.0  # Seconds to start the model process with its libraries, once per run.
MERGING = 1.5  # Seconds until the engine starts reading.
AROUND = 3.0  # Seconds for checks, judging, explanation, report and publication.


@dataclass(frozen=True)
class NetworkSize:
    """Number of parameters, bytes and tensors of a model to evaluate."""

    parameters: int
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class PromptLoad:
    """Amount of text in one evaluation pass."""

    requests: float  # Number of texts that the model reads.
    tokens: float  # Number of tokens in all texts.
    written: float = 0.0  # Number of tokens that the model generates.
    batch: int = 1  # Number of texts per batch.


def evaluation_seconds(size: NetworkSize, load: PromptLoad, rates: Rates) -> float:
    """Return the seconds to load a model and to evaluate it.

    ``rates`` are measured on this machine, including ``products``. If ``bus`` is not zero, they are the rates of a GPU.
    """
    memory = rates.products / _OPERATIONS_A_BYTE if rates.bus else rates.copy
    calls = (load.requests + load.written) / load.batch
    arithmetic = 2 * size.parameters * (load.tokens + load.written) / (_REACHED * rates.products)
    overhead = calls * (_CALL + _TENSOR * size.tensors) + load.requests * _REQUEST
    return _LOADING + size.nbytes / rates.read + max(arithmetic, calls * size.nbytes / memory) + overhead


def merge_seconds(nbytes_read: int, nbytes_written: int, rates: Rates) -> float:
    """Return the seconds to merge, if reading and writing do not overlap."""
    return MERGING + nbytes_read / rates.read + nbytes_written / rates.write + nbytes_written / rates.hash

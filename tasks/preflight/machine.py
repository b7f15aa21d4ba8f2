"""What this machine has, against what a run will need: disk, memory, memory of the GPU.

Looked at anew in every run, so none of it is cached. What cannot work is refused before anything is downloaded; what
may not work is a warning of ``mergegate check``: other programs may have ended until then.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.errors import Finding
from mergegate.merge_core.system import Capacity, system_memory
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.checkpoints import ResolvedCheckpoint, gpu_memory
from mergegate.tasks.preflight.compatibility import Compatibility
from mergegate.tasks.stage import home, nearest

_SPARE = 1.1  # of what is known to be needed; file systems keep some for themselves
# Weights in memory are not all: activations, the logits of a batch, the libraries.
_TO_EVALUATE = 1.3
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of one parameter


@dataclass(frozen=True)
class Disk:
    """A disk that a run writes to.

    Args:
        place: A directory on it, for messages.
        free: Bytes.
        writes: Why → how many bytes.
    """

    place: Path
    free: int
    writes: Mapping[str, int]


@dataclass(frozen=True)
class Machine:
    """What there is.

    Args:
        cores: That the merge may use.
        disks: With what is to be written to them.
        memory: None where the system does not say.
        gpu: Of the device that the merge uses; None on a CPU.
    """

    cores: int
    disks: tuple[Disk, ...]
    memory: Capacity | None
    gpu: Capacity | None = None


def measure_machine_capacity(compatibility: Compatibility, found: Sequence[ResolvedCheckpoint], device: str) -> Machine:
    """The machine that we are on, for a merge of ``found`` on ``device`` (``cpu``, ``cuda``, ``cuda:N``)."""
    from mergegate.merge_core.engine import usable_cores

    return Machine(
        cores=usable_cores(),
        disks=_disks(compatibility.disk, found),
        memory=system_memory(),
        gpu=gpu_memory(device) if device != "cpu" else None,
    )


def machine_findings(
    compatibility: Compatibility, machine: Machine, *, device: str, dtypes: Sequence[str] = ()
) -> tuple[Finding, ...]:
    """What ``machine`` lacks for a merge and for evaluating its models.

    Args:
        dtypes: In which the models are to be evaluated (``auto``, ``bfloat16``, ``float16``, ``float32``); none: they
            are not.
    """
    if compatibility.blocking():  # nothing is known about a merge that cannot be
        return ()
    return (*_disk_findings(machine), *_memory_findings(compatibility, machine, device, dtypes))


def _disk_findings(machine: Machine) -> Iterator[Finding]:
    for disk in machine.disks:
        needed = round(_SPARE * sum(disk.writes.values()))
        if disk.free < needed:
            parts = " and ".join(f"{format_bytes(count)} for {why}" for why, count in disk.writes.items() if count)
            yield Finding(
                severity="block",
                where=str(disk.place),
                found=f"{format_bytes(disk.free)} free",
                expected=f"{format_bytes(needed)}: {parts}, and a tenth to spare",
                remedy="free some space, or point MERGEGATE_HOME or HF_HOME to a larger disk",
            )


def _memory_findings(
    compatibility: Compatibility, machine: Machine, device: str, dtypes: Sequence[str]
) -> Iterator[Finding]:
    from mergegate.merge_core.engine import EngineSettings
    from mergegate.merge_core.engine.forecast import peak_memory

    threads = EngineSettings().workers_on(machine.cores)
    merging = peak_memory(compatibility.block, threads=threads, device=device, held=compatibility.held)
    yield from _lacking("memory", machine.memory, merging, "merging", "merge on a machine with more memory")
    if machine.gpu:
        on_gpu = threads * compatibility.gpu_block
        yield from _lacking(f"memory of {device}", machine.gpu, on_gpu, "merging", "merge: {device: cpu}")
    weights = max((_in_memory(compatibility, dtype) for dtype in dtypes), default=0)
    evaluating, where = round(_TO_EVALUATE * weights), f"memory of {device}" if machine.gpu else "memory"
    place = machine.gpu or machine.memory
    if place and place.available < evaluating:
        yield Finding(
            severity="warn",
            where=where,
            found=f"{format_bytes(place.available)} available",
            expected=f"about {format_bytes(evaluating)} to evaluate the largest model",
            remedy="evaluate in dtype: bfloat16, on a larger machine, or with a server as backend",
        )


def _lacking(where: str, capacity: Capacity | None, needed: int, to: str, remedy: str) -> Iterator[Finding]:
    if capacity is None or capacity.available >= needed:
        return
    never = capacity.total < needed
    yield Finding(
        severity="block" if never else "warn",
        where=where,
        found=f"{format_bytes(capacity.total)} in all"
        if never
        else f"{format_bytes(capacity.available)} available now",
        expected=f"about {format_bytes(needed)} for {to}",
        remedy=remedy if never else "end other programs first",
    )


def _in_memory(compatibility: Compatibility, dtype: str) -> int:
    """Bytes of the weights of the largest model in ``dtype``."""
    width = _WIDTH.get(dtype)
    return compatibility.largest_bytes if width is None else width * compatibility.largest_parameters


def _disks(merged: int, found: Sequence[ResolvedCheckpoint]) -> tuple[Disk, ...]:
    """The project's disk and that of the Hub's cache, which may be one."""
    snapshots = {one.directory: one for parent in found for one in parent.snapshots}
    coming = {place: snapshot.bytes_to_download for place, snapshot in snapshots.items()}
    wanted = [(home(), "the merged checkpoint", merged)]
    wanted += [(place, "weights from the Hub", count) for place, count in coming.items() if count]
    disks: dict[int, Disk] = {}
    for place, why, count in wanted:
        there = nearest(place)
        device = there.stat().st_dev
        known = disks.get(device) or Disk(there, shutil.disk_usage(there).free, {})
        disks[device] = Disk(known.place, known.free, {**known.writes, why: known.writes.get(why, 0) + count})
    return tuple(disks.values())

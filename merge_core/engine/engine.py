"""Carrying out a plan: its steps and then itself, into a directory that is complete when ``config.json`` is there.

Several processes, also on several machines that share the file system, may carry out the same plan into the same
directory at once: they divide its shards (see :mod:`.journal`), and all of them return when it is complete.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mergegate.merge_core.checkpoint import DerivedTensor
from mergegate.merge_core.engine import journal
from mergegate.merge_core.engine.coordination import one_at_a_time, participating
from mergegate.merge_core.engine.devices import SingleThreadedTorch, choose_devices
from mergegate.merge_core.engine.execution import execute
from mergegate.merge_core.engine.health import judge_health
from mergegate.merge_core.engine.inputs import open_inputs, require_prepared
from mergegate.merge_core.engine.output import CONFIG, STEPS, check_directory, file_names, write_companions
from mergegate.merge_core.engine.pages import input_pages
from mergegate.merge_core.engine.settings import EngineSettings
from mergegate.merge_core.engine.writer import PARTIAL, name_shards, shard_disk_errors_refused
from mergegate.merge_core.errors import Finding, worst_first
from mergegate.merge_core.files import remove_any, remove_contents, state_directory
from mergegate.merge_core.plan import MergePlan

_log = logging.getLogger(__name__)


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
        bytes_resumed: Output bytes that an interrupted merge, or another participant, had already written.
        findings: What is wrong with the output, worst first.
        note: Why it was not computed where ``auto`` would rather have done it; else empty.
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
    note: str = ""


def merge_weights(
    plan: MergePlan,
    out: Path,
    *,
    seed: int = 0,
    device: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
    settings: EngineSettings | None = None,
    before_sealing: Callable[[], None] = lambda: None,
) -> MergeRecord:
    """Carry out ``plan`` into the directory ``out``, alone or together with others that do the same.

    Args:
        plan: From :func:`merge_core.plan.plan_merge`.
        out: New or empty directory, or one with an unfinished merge. ``config.json`` appears in it last: without it
            the merge did not finish.
        seed: Of the random masks.
        device: ``cpu``; ``cuda``: every GPU; ``cuda:1``; or ``auto``: GPUs if there are any.
        on_progress: Called in this thread with output bytes done and in all, a few times a second and at the end.
        settings: How to run; has no influence on the result.
        before_sealing: Called when everything has been read and ``config.json`` is not there yet. What it raises leaves
            an unfinished merge.

    Raises:
        InvalidInput: The recipe asks for what has not been prepared; an input file is not what its header said; it
            holds NaN or infinity; integer tensors differ; ``out`` is not empty.
        ChangedInput: An input file was changed or replaced while it was read.
        Refused: The disk is full or fails.
    """
    require_prepared(plan)
    began = time.monotonic()
    devices, settings = choose_devices(device), settings or EngineSettings()
    parts = (*plan.steps, plan)
    total = sum(part.bytes_written for part in parts)
    done = found = 0
    findings: list[Finding] = list(plan.findings)
    digests: dict[str, str] = {}

    def check() -> None:
        check_directory(out, expected=file_names(plan))

    def prepare() -> None:
        with shard_disk_errors_refused(out):
            (out / CONFIG).unlink(missing_ok=True)  # Until the merge is finished again.

    def tidy() -> None:
        shutil.rmtree(out / STEPS, ignore_errors=True)
        journal.remove_journals(out)

    def report(written: int) -> None:
        if on_progress is not None:
            on_progress(done + written, total)

    with shard_disk_errors_refused(out):
        out.mkdir(parents=True, exist_ok=True)
    with SingleThreadedTorch() as torch, participating(out, check=check, prepare=prepare, tidy=tidy):
        if any(isinstance(item.tensor, DerivedTensor) for part in parts for job in part.jobs for item in job.inputs):
            torch.expect()
        pages = input_pages(parts)
        for part in parts:
            place = out if part is plan else out / STEPS / str(part.recipe.name)
            with shard_disk_errors_refused(place):
                place.mkdir(parents=True, exist_ok=True)
            with open_inputs(part, lambda step, name: out / STEPS / step / name) as files:
                outcome = execute(
                    part,
                    place,
                    seed=seed,
                    devices=devices,
                    settings=settings if part is plan else replace(settings, keep_output=True),  # They are read next.
                    files=files,
                    pages=pages,
                    torch=torch,
                    on_progress=report,
                )
            with one_at_a_time(out):
                name_shards(place, part.shards)
                digests = dict(outcome.digests)
                if part is plan:
                    digests.update(write_companions(part, place, before_sealing))
            traits = part.method.traits
            findings += judge_health(outcome.health, may_zero=traits.may_zero, any_size=traits.makes_state)
            found += outcome.found
            done += part.bytes_written
    return MergeRecord(
        method=plan.method.name,
        tensors=len(plan.jobs),
        parameters=plan.parameters,
        bytes_read=sum(part.bytes_read for part in parts),
        bytes_written=total,
        files=dict(sorted(digests.items())),
        seconds=time.monotonic() - began,
        device=str(devices),
        bytes_resumed=found,
        findings=worst_first(findings),
        note=devices.note,
    )


def start_or_resume(out: Path, plan: MergePlan) -> None:
    """Leave in ``out`` only what the merge of ``plan`` can be resumed from.

    Call it only for a directory that is ours: in the store, or yielded by ``new_directory``. Without a journal,
    everything in it is removed. With one, only what this merge does not write, which would stop every later run.

    Raises:
        DiskRefused: when ``out`` cannot be written.
    """
    with shard_disk_errors_refused(out):
        if not journal.exists(out):
            remove_contents(out)
        state_directory(out)
        expected = file_names(plan)
        for step in plan.steps:
            expected |= {f"{STEPS}/{step.recipe.name}/{shard.name}" for shard in step.shards}
        folders = {folder.as_posix() for name in expected for folder in Path(name).parents}
        for above, directories, names in os.walk(out):
            place = Path(above)
            for name in (*directories, *names):
                path, relative = place / name, (place / name).relative_to(out).as_posix()
                mode = path.lstat().st_mode
                ours = stat.S_ISREG(mode) and (name.endswith(PARTIAL) or relative in expected)
                if not ours and not (stat.S_ISDIR(mode) and relative in folders):
                    _log.warning("%s: not of this merge; removed", path)
                    remove_any(path)
            directories[:] = [name for name in directories if (place / name).is_dir()]

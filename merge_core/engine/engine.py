"""Execute a plan and its steps, and write the result into a directory. It is complete once ``config.json`` exists.

Several processes can execute the same plan for the same directory at the same time, also on several machines that share
the file system. They divide the shards (see :mod:`.journal`), and all of them return when the directory is complete.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mergegate.merge_core.checkpoint import DerivedTensor
from mergegate.merge_core.engine import journal
from mergegate.merge_core.engine.devices import EngineSettings, SingleThreadedTorch, choose_devices
from mergegate.merge_core.engine.execution import ComputeContext, DocumentRun, open_inputs, require_prepared
from mergegate.merge_core.engine.health import judge_health
from mergegate.merge_core.engine.input_files import input_pages
from mergegate.merge_core.engine.journal import FINISHING, join_merge
from mergegate.merge_core.engine.output import CONFIG, STEPS, check_directory, file_names, write_companions
from mergegate.merge_core.engine.writer import PARTIAL, refuse_disk_errors
from mergegate.merge_core.errors import Finding, worst_first
from mergegate.merge_core.files import ASIDE, hold_lock, remove_any, remove_contents, state_directory
from mergegate.merge_core.plan import MergePlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeRecord:
    """Result and statistics of a merge.

    Args:
        method: Name of the merge method.
        tensors: Number of output tensors.
        parameters: Number of output elements.
        bytes_read: Bytes of all inputs, including those of steps.
        bytes_written: Bytes of all output shards, including those of steps.
        files: sha256 of every file in the output directory, by name.
        seconds: Wall-clock time.
        device: Names of the devices that computed the merge.
        bytes_resumed: Output bytes that an interrupted merge or another participant had already written.
        findings: Problems with the plan and the output, most severe first.
        note: Reason why ``auto`` did not choose a GPU. Empty if it did.
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
    """Execute ``plan`` and write the result into ``out``, alone or together with other processes that do the same.

    Args:
        plan: Plan from :func:`merge_core.plan.plan_merge`.
        out: New or empty directory, or one with an unfinished merge of the plan.
        seed: Seed of the random masks.
        device: ``cpu``, ``cuda`` (all GPUs), ``cuda:1``, or ``auto`` (GPUs, or else the CPU).
        on_progress: Function called in this thread with the finished and the total output bytes, several times per
            second and at the end.
        settings: Settings of the engine. They do not influence the result.
        before_sealing: Function called when all inputs have been read, before ``config.json`` is written. If it raises,
            the merge stays unfinished.

    Raises:
        InvalidInput: The recipe needs a preparation that is missing, an input file does not match its header or has NaN
            or infinity, integer tensors differ, or ``out`` is not empty.
        ChangedInput: An input file was changed or replaced while it was read.
        DiskUnavailable: The disk is full or fails.
    """
    require_prepared(plan)
    began = time.monotonic()
    devices, settings = choose_devices(device), settings or EngineSettings()
    parts = (*plan.steps, plan)
    total = sum(part.bytes_written for part in parts)
    bytes_done = resumed = 0
    findings: list[Finding] = list(plan.findings)
    digests: dict[str, str] = {}

    def check() -> None:
        check_directory(out, expected=file_names(plan))

    def prepare() -> None:
        with refuse_disk_errors(out):
            (out / CONFIG).unlink(missing_ok=True)  # It is written again when the merge finishes.

    def tidy() -> None:
        shutil.rmtree(out / STEPS, ignore_errors=True)
        for path in (*out.glob(f"**/*{journal.SUFFIX}"), *out.glob(f"**/*{PARTIAL}{ASIDE}*")):
            remove_any(path)

    def report(written_bytes: int) -> None:
        if on_progress is not None:
            on_progress(bytes_done + written_bytes, total)

    with refuse_disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with SingleThreadedTorch() as torch, join_merge(out, check=check, prepare=prepare, tidy=tidy):
        if any(isinstance(item.tensor, DerivedTensor) for part in parts for job in part.jobs for item in job.inputs):
            torch.import_early()
        context = ComputeContext(seed, devices, settings, input_pages(parts), torch)
        for part in parts:
            directory = out if part is plan else out / STEPS / str(part.recipe.name)
            with refuse_disk_errors(directory):
                directory.mkdir(parents=True, exist_ok=True)
            with open_inputs(part, lambda step, name: out / STEPS / step / name) as files:
                # Later documents read the results of steps, so these stay in the page cache.
                part_context = (
                    context if part is plan else replace(context, settings=replace(settings, keep_output=True))
                )
                outcome = DocumentRun(part, directory, part_context, files, report).execute()
            # Only one participant at a time may rename shards and write the other files.
            with ExitStack() as finishing:
                with refuse_disk_errors(out / FINISHING):
                    finishing.enter_context(hold_lock(out / FINISHING, required=False))
                for shard in part.shards:  # A shard may already have its final name.
                    partial = directory / f"{shard.name}{PARTIAL}"
                    with refuse_disk_errors(partial):
                        if partial.exists():
                            partial.rename(directory / shard.name)
                digests = dict(outcome.digests)
                if part is plan:
                    digests.update(write_companions(part, directory, before_sealing))
            findings += judge_health(outcome.health, may_zero=part.method.traits.may_zero)
            resumed += outcome.bytes_resumed
            bytes_done += part.bytes_written
    return MergeRecord(
        method=plan.method.name,
        tensors=len(plan.jobs),
        parameters=plan.parameters,
        bytes_read=sum(part.bytes_read for part in parts),
        bytes_written=total,
        files=dict(sorted(digests.items())),
        seconds=time.monotonic() - began,
        device=str(devices),
        bytes_resumed=resumed,
        findings=worst_first(findings),
        note=devices.note,
    )


def start_or_resume(out: Path, plan: MergePlan) -> None:
    """Prepare ``out`` for the merge of ``plan``: keep the files of an unfinished merge, and remove all others.

    Other files would make every later run fail. If there is no unfinished merge, everything is removed. Call this only
    for a directory that belongs to mergegate: one in the store, or one from ``new_directory``.

    Raises:
        DiskUnavailable: ``out`` cannot be written.
    """
    with refuse_disk_errors(out):
        if not journal.exists(out):
            remove_contents(out)
        state_directory(out)
        expected_names = file_names(plan)
        for step in plan.steps:
            expected_names |= {f"{STEPS}/{step.recipe.name}/{shard.name}" for shard in step.shards}
        folders = {folder.as_posix() for name in expected_names for folder in Path(name).parents}
        for parent, directories, names in os.walk(out):
            directory = Path(parent)
            for name in (*directories, *names):
                path, relative = directory / name, (directory / name).relative_to(out).as_posix()
                mode = path.lstat().st_mode
                belongs = stat.S_ISREG(mode) and (name.endswith(PARTIAL) or relative in expected_names)
                if not belongs and not (stat.S_ISDIR(mode) and relative in folders):
                    _log.warning("%s: not of this merge; removed", path)
                    remove_any(path)
            directories[:] = [name for name in directories if (directory / name).is_dir()]

"""Execute a plan and its steps, and write the result into a directory. It is complete once ``config.json`` exists.

Several processes can execute the same plan for the same directory at the same time, also on several machines that share
the file system. They divide the shards (see :mod:`.journal`), and all of them return when the directory is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mergegate.merge_core.checkpoint import INDEX_NAME, DerivedTensor
from mergegate.merge_core.engine.devices import EngineSettings, SingleThreadedTorch, choose_devices
from mergegate.merge_core.engine.execution import DocumentRun, open_inputs, require_prepared
from mergegate.merge_core.engine.health import judge_health
from mergegate.merge_core.engine.input_files import input_pages
from mergegate.merge_core.engine.journal import CONFIG, FINISHING, NAME, STEPS, join_merge
from mergegate.merge_core.engine.tensor_run import ComputeContext
from mergegate.merge_core.engine.writer import PARTIAL, refuse_disk_errors
from mergegate.merge_core.errors import Finding, InvalidInput, worst_first
from mergegate.merge_core.files import fsync, has_mark, hold_lock, remove_any, remove_contents, state_directory
from mergegate.merge_core.parsing import parse_json_object
from mergegate.merge_core.plan import MergePlan, network_shards, requires_index, serialize_config

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

    def report(written_bytes: int) -> None:
        if on_progress is not None:
            on_progress(bytes_done + written_bytes, total)

    with refuse_disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with SingleThreadedTorch() as torch, join_merge(out, file_names(plan)):
        if any(isinstance(item.tensor, DerivedTensor) for part in parts for job in part.jobs for item in job.inputs):
            torch.import_early()
        context = ComputeContext(seed, devices, settings, torch, input_pages(parts))
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
    """
    with refuse_disk_errors(out):
        if not has_mark(out / NAME):  # There is no unfinished merge.
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


# Libraries write these fields but do not read them. They contain the directory of the user who saved the file.
_ORIGIN_FIELDS = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file")


def write_companions(plan: MergePlan, out: Path, when_read: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Write all files of a merge other than its weights, ``config.json`` last, and return their sha256 by name.

    ``when_read`` is called after the parents' files have been read and before any file is written.
    """
    contents = {name: plan.companions.read(name) for name in plan.companions}
    if requires_index(plan.shards):
        shards = network_shards(plan.shards)
        weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.stored}
        total = sum(shard.size - len(shard.header) for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        contents[INDEX_NAME] = f"{json.dumps(index, indent=2)}\n".encode()
    contents[CONFIG] = serialize_config(dict(plan.config))
    # Remove the fields in which libraries record the path of the loaded model.
    for name, content in contents.items():
        if name.endswith("config.json") and any(field.encode() in content for field in _ORIGIN_FIELDS):
            try:
                config = parse_json_object(content, name)
            except InvalidInput:  # No library can read this file, so it is copied unchanged.
                continue
            local = {field for field in _ORIGIN_FIELDS if str(config.get(field, "")).startswith(("/", "~", "file:"))}
            if local:
                contents[name] = serialize_config({key: value for key, value in config.items() if key not in local})
    when_read()
    for name, content in contents.items():  # The config comes last.
        _write(out / name, content)
    with refuse_disk_errors(out):
        fsync(out)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def file_names(plan: MergePlan) -> set[str]:
    """Return the names of all files that a merge writes."""
    return {
        *(shard.name for shard in plan.shards),
        *plan.companions,
        *([INDEX_NAME] if requires_index(plan.shards) else []),
        CONFIG,
    }


def _write(path: Path, content: bytes) -> None:
    with refuse_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)

"""Check compatibility: find everything that can be wrong with a merge, from headers and configurations alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core import Checkpoint, Finding, PlannedMerge, Recipe, open_checkpoint, plan_with_findings
from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind, find_kind
from mergegate.merge_core.checkpoint import is_head, is_module_file, list_uncopied, ties_embeddings
from mergegate.merge_core.errors import InvalidInput, MergegateError, group_findings, worst_first
from mergegate.merge_core.parsing import open_plain, read_json, read_plain
from mergegate.tasks.checkpoints import (
    ResolvedAdapter,
    ResolvedCheckpoint,
    adapter_findings_of_parents,
    open_parent,
    require_combinable,
    size_of_adapter,
)
from mergegate.tasks.preflight.custom_code import custom_code_findings
from mergegate.tasks.preflight.segmentation import add_segmentation_shares, tokenizer_class_findings
from mergegate.tasks.preflight.skeleton import skeleton_findings
from mergegate.tasks.stage import StageValue, value_stage
from mergegate.tasks.store import NotInKey, digest

_WEIGHTS = (".safetensors", ".bin")
_MAX_COMPANION_BYTES = 256 << 20
_MAX_LISTED = 10  # Largest number of further problems in one message.


class HeaderDigest(BaseModel):
    """Digest of everything that the check reads from one parent.

    For a directory, it covers the names and sizes of all files and the content of the small ones. For a commit on the
    Hub, it covers the commit's file list.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ref: str
    digest: str


class Compatibility(StageValue):
    """All findings together, and the size of the job in bytes. Sizes are zero if a finding blocks.

    For an adapter that combines other adapters, ``tensors``, ``bytes_read`` and ``bytes_written`` describe the adapter
    itself.

    Attributes:
        disk: Space for the merged checkpoint, including results of steps that exist until the end. For an adapter,
            space for it and for the merged model, which is written for programs that cannot load adapters.
        block: Size of the engine's largest block in memory; a merge holds several.
        gpu_block: Size of the engine's largest block on a GPU.
        largest_bytes: Size of the stored weights of the largest model to evaluate.
        largest_parameters: Number of parameters of that model.
    """

    remarks: tuple[Finding, ...]
    tensors: int
    bytes_read: int
    bytes_written: int
    disk: int
    block: int
    gpu_block: int
    largest_bytes: int
    largest_parameters: int
    # Kind of the merged model, from its planned configuration and files. If a finding blocks, it may be unknown.
    kind: Annotated[ModelKind, NotInKey, Field(exclude_if=lambda kind: kind == TEXT_GENERATOR)] = TEXT_GENERATOR
    # Memory in addition to blocks, for methods that work on matrices. Other methods need none.
    held: Annotated[int, Field(exclude_if=lambda held: held == 0)] = 0

    def blocking(self) -> tuple[Finding, ...]:
        return tuple(remark for remark in self.remarks if remark.severity == "block")

    def summary(self) -> str:
        if groups := group_findings(self.blocking()):
            more = f" (and {len(groups) - 1} more)" if len(groups) > 1 else ""
            return f"{groups[0].first}{more}"
        warnings = sum(remark.severity == "warn" for remark in self.remarks)
        size = f"{self.tensors} tensors, {self.bytes_written / 1e6:,.1f} MB to write"
        return size + (f", {warnings} warnings" if warnings else "")

    def refusal(self) -> MergegateError | None:
        blocking = self.blocking()
        if not blocking:
            return None
        worst, *others = group_findings(blocking)
        also = "".join(f"\n  also: {group.first}" for group in others[:_MAX_LISTED])
        if len(others) > _MAX_LISTED:
            also += f"\n  also: {len(others) - _MAX_LISTED} more; run 'mergegate check' to see all"
        return replace(worst.first, found=worst.first.found + also).refusal()


def header_digests(parents: Sequence[ResolvedCheckpoint]) -> tuple[HeaderDigest, ...]:
    """Return one digest per parent of what the check reads: names, sizes, headers, small files and output heads."""
    digests = []
    for parent in parents:
        files = _files_digest(parent)
        if parent.adapter:  # Its findings also depend on its card and on whether its factors are zero.
            files = digest([files, _files_digest(parent.adapter), *map(str, parent.adapter.findings(parent.ref))])
        digests.append(HeaderDigest(ref=parent.ref, digest=files))
    return tuple(digests)


@value_stage("compat", version=10)
def check_compatibility(
    recipe: Recipe,
    metadata: Sequence[HeaderDigest],
    parents: Sequence[ResolvedCheckpoint],
    accepted_code: tuple[str, ...] | None = None,
    accepted_tokenizers: tuple[str, ...] = (),
) -> Compatibility:
    """Return findings about the recipe and its parents, before any weight is read or downloaded.

    ``accepted_code`` names the code that the profile allows in the release. None means that the profile has no such
    setting, so code only leads to warnings. ``accepted_tokenizers`` names the parts of tokenizers that may differ.

    Raises:
        InvalidInput: A parent cannot be a checkpoint.
        Refused: A parent cannot be read. This is not stored as a finding, because the Hub may respond next time.
    """
    from mergegate.merge_core.engine import EngineSettings
    from mergegate.merge_core.engine.forecast import estimate_needs

    require_combinable(recipe, parents)
    planned, checkpoints = plan_cached(recipe, parents, metadata, accepted_tokenizers)
    code = custom_code_findings(planned.plan, accepted_code) if planned.plan else ()
    code = (*code, *tokenizer_class_findings(planned.plan, checkpoints))
    findings = worst_first(
        [*add_segmentation_shares(planned), *adapter_findings_of_parents(parents, checkpoints), *code]
    )
    if planned.plan and not planned.blocking:  # Without a plan, the reason is already known.
        findings = worst_first([*findings, *skeleton_findings(planned.plan, checkpoints)])
    sizes = {field: 0 for field in Compatibility.model_fields if field not in ("remarks", "kind")}
    kind = find_kind(planned.plan.config, planned.plan.companions) if planned.plan else TEXT_GENERATOR
    if (plan := planned.plan) and all(finding.severity != "block" for finding in findings):
        # Disk and blocks do not depend on the number of cores or the kind of device.
        needs = estimate_needs(plan, EngineSettings(), cores=1, device="cpu", companion_bytes=plan.companions.nbytes())
        sizes = {"disk": needs.disk, "block": needs.block, "gpu_block": needs.gpu_block, "held": needs.held_bytes}
        sizes |= {"tensors": len(plan.jobs), "bytes_read": plan.bytes_read, "bytes_written": plan.bytes_written}
        evaluated = [
            (checkpoint.nbytes, sum(tensor.numel for tensor in checkpoint.tensors.values()))
            for checkpoint in checkpoints.values()
        ]
        largest = max([*evaluated, (plan.bytes_written, plan.parameters)])
        sizes |= {"largest_bytes": largest[0], "largest_parameters": largest[1]}
        if adapter := size_of_adapter(recipe, parents):
            sizes |= {"tensors": adapter.tensors, "bytes_read": adapter.read, "bytes_written": adapter.nbytes}
            sizes["disk"] += adapter.nbytes + adapter.scratch
    return Compatibility(remarks=tuple(findings), kind=kind, **sizes)


Planned = tuple[PlannedMerge, Mapping[str, Checkpoint]]
# The last plan of this process, by its inputs, so that a check that was not cached does not need a second plan.
_last_plan: dict[str, Planned] = {}


def plan_cached(
    recipe: Recipe,
    parents: Sequence[ResolvedCheckpoint],
    metadata: Sequence[HeaderDigest],
    accepted_tokenizers: Sequence[str] = (),
) -> Planned:
    """Return the plan with its findings, and the headers of the parents by reference.

    If nothing has changed since the last plan of this process, including the header digests ``metadata``, it is
    returned again.

    Raises:
        InvalidInput: A parent cannot be a checkpoint.
        Refused: A parent cannot be read.
    """
    directories = [
        (str(parent.directory), str(parent.adapter.directory) if parent.adapter else "") for parent in parents
    ]
    key = digest([recipe.canonical(), str(recipe.directory), directories, metadata, sorted(accepted_tokenizers)])
    if key not in _last_plan:
        checkpoints = {parent.ref: open_parent(parent) for parent in parents}
        planned = plan_with_findings(recipe, checkpoints, accepted_tokenizers)
        _last_plan.clear()
        _last_plan[key] = planned, checkpoints
    return _last_plan[key]


def _files_digest(parent: ResolvedCheckpoint | ResolvedAdapter) -> str:
    running = hashlib.sha256()
    if parent.snapshot:
        for name in parent.snapshot.deciding:
            file = parent.snapshot.files[name]
            running.update(f"{name}\0{file.size}\0{file.sha256 or file.blob}\0".encode())
        return running.hexdigest()
    for name in parent.deciding:
        path = parent.directory / name
        running.update(f"{name}\0{path.stat().st_size}\0".encode())
        if path.suffix not in _WEIGHTS or is_module_file(name):
            running.update(read_plain(path, _MAX_COMPANION_BYTES, within=parent.directory))
            continue
        # The bytes that describe a weight file's content: a safetensors header, or the start of other formats.
        with open_plain(path) as weights:
            start = weights.read(8)
            # The checkpoint reader rejects a wrong length. Here the length must only not exhaust the memory.
            length = min(int.from_bytes(start, "little"), os.fstat(weights.fileno()).st_size, 1 << 27)
            running.update(start + (weights.read(length) if path.suffix == ".safetensors" else b""))
    for name in list_uncopied(parent.directory):
        running.update(f"{name}\0".encode(errors="surrogateescape"))
    # The check answers one question from weights: whether a stored output head is the embedding. It asks only if
    # config.json does not declare untied embeddings.
    with suppress(InvalidInput):  # An adapter, or a damaged checkpoint: the check itself reports that.
        if ties_embeddings(read_json(parent.directory / "config.json")) is not False:
            heads = filter(is_head, open_checkpoint(parent.directory).tensors)
            running.update("\0".join(heads).encode())
    return running.hexdigest()

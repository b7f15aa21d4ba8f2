"""The compatibility check: everything that can be wrong with a merge, found from headers and configurations alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core import (
    Checkpoint,
    Finding,
    MergePlan,
    PlannedMerge,
    Recipe,
    open_checkpoint,
    plan_with_findings,
)
from mergegate.merge_core.checkpoint import is_head, is_module_file, list_others, ties_embeddings
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
from mergegate.tasks.preflight.segmentation import add_segmentation_shares
from mergegate.tasks.stage import StageValue, value_stage
from mergegate.tasks.store import digest

_WEIGHTS = (".safetensors", ".bin")
_MOST_BESIDE = 256 << 20
_MOST_SAID = 10  # problems beside the first, in one message


class HeaderDigest(BaseModel):
    """Identity of what the check reads of one parent: of a directory names and sizes of all files and content of the
    small ones; of a commit on the Hub what it lists."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ref: str
    digest: str


class Compatibility(StageValue):
    """All findings at once, and the size of the job: bytes, all zero where something blocks.

    Of an adapter that is made of others, ``tensors``, ``bytes_read`` and ``bytes_written`` are its own.

    Attributes:
        disk: That the merged checkpoint takes, with results of steps until the end. Of an adapter: it, and the model
            that it makes, which is written for whoever has to load it.
        block: Of the engine's largest block, in memory; a merge holds several.
        gpu_block: The same on a GPU.
        largest_bytes: Weights of the largest model to be evaluated, as they are stored.
        largest_parameters: Number of its parameters.
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
    # Bytes held beside blocks, by methods that work on matrices; nothing of others.
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
        also = "".join(f"\n  also: {group.first}" for group in others[:_MOST_SAID])
        if len(others) > _MOST_SAID:
            also += f"\n  also: {len(others) - _MOST_SAID} more, which 'mergegate check' shows"
        return replace(worst.first, found=worst.first.found + also).refusal()


def header_digests(parents: Sequence[ResolvedCheckpoint]) -> tuple[HeaderDigest, ...]:
    """Return the identity of what the check reads: files' names, sizes and headers, small files, and stored heads."""
    return tuple(HeaderDigest(ref=parent.ref, digest=_metadata_digest(parent)) for parent in parents)


@value_stage("compat", version=7)
def check_compatibility(
    recipe: Recipe,
    metadata: Sequence[HeaderDigest],
    parents: Sequence[ResolvedCheckpoint],
    accepted_code: tuple[str, ...] | None = None,
    accepted_tokenizers: tuple[str, ...] = (),
) -> Compatibility:
    """Findings about the recipe and its parents; blocks before any weight is read, or downloaded.

    Args:
        accepted_code: What code the profile lets travel with the release; None: nobody has said, which only warns.
        accepted_tokenizers: Parts in which the profile lets tokenizers differ.

    Raises:
        InvalidInput: for a parent that cannot be a checkpoint.
        Refused: for one that cannot be looked into. Not kept as a finding: the Hub may answer the next time.
    """
    require_combinable(recipe, parents)
    planned, checkpoints = plan_cached(recipe, parents, metadata, accepted_tokenizers)
    code = custom_code_findings(planned.plan, accepted_code) if planned.plan else ()
    findings = worst_first([*add_segmentation_shares(planned), *adapter_findings_of_parents(parents), *code])
    found = _compatibility(findings, None if planned.blocking else planned.plan, checkpoints)
    size = None if planned.blocking else size_of_adapter(recipe, parents)
    if size is None:
        return found
    own = {"tensors": size.tensors, "bytes_read": size.read, "bytes_written": size.nbytes}
    return found.model_copy(update={**own, "disk": found.disk + size.nbytes + size.scratch})


def open_and_plan(
    recipe: Recipe, parents: Sequence[ResolvedCheckpoint], accepted_tokenizers: Sequence[str] = ()
) -> tuple[PlannedMerge, Mapping[str, Checkpoint]]:
    """Findings and plan, assembled once; and the parents' headers by reference, each read once.

    Raises:
        InvalidInput: for a parent that cannot be a checkpoint.
        Refused: for one that cannot be looked into.
    """
    checkpoints = {parent.ref: open_parent(parent) for parent in parents}
    return plan_with_findings(recipe, checkpoints, accepted_tokenizers), checkpoints


Planned = tuple[PlannedMerge, Mapping[str, Checkpoint]]
# The last plan of this process, by what it was made of: a check that was made now, and not found, has it already.
_last: dict[str, Planned] = {}


def plan_cached(
    recipe: Recipe,
    parents: Sequence[ResolvedCheckpoint],
    metadata: Sequence[HeaderDigest],
    accepted_tokenizers: Sequence[str] = (),
) -> Planned:
    """As :func:`open_and_plan`; what was planned last from the same headers is not read again.

    Args:
        metadata: Of the parents, as they are now.
    """
    places = [(str(one.directory), str(one.adapter.directory) if one.adapter else "") for one in parents]
    key = digest([recipe.canonical(), str(recipe.directory), places, metadata, sorted(accepted_tokenizers)])
    if key not in _last:
        planned = open_and_plan(recipe, parents, accepted_tokenizers)
        _last.clear()
        _last[key] = planned
    return _last[key]


def _compatibility(
    remarks: Sequence[Finding], plan: MergePlan | None, checkpoints: Mapping[str, Checkpoint]
) -> Compatibility:
    if plan is None:
        return Compatibility(
            remarks=tuple(remarks),
            tensors=0,
            bytes_read=0,
            bytes_written=0,
            disk=0,
            block=0,
            gpu_block=0,
            largest_bytes=0,
            largest_parameters=0,
        )
    from mergegate.merge_core.engine import EngineSettings
    from mergegate.merge_core.engine.forecast import estimate_needs

    # Neither disk nor blocks depend on the cores or the kind of device.
    needs = estimate_needs(plan, EngineSettings(), cores=1, device="cpu", companion_bytes=plan.companions.nbytes())
    sizes = [(one.nbytes, sum(tensor.numel for tensor in one.tensors.values())) for one in checkpoints.values()]
    largest = max([*sizes, (plan.bytes_written, plan.parameters)])
    return Compatibility(
        remarks=tuple(remarks),
        tensors=len(plan.jobs),
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        disk=needs.disk,
        block=needs.block,
        gpu_block=needs.gpu_block,
        held=needs.held,
        largest_bytes=largest[0],
        largest_parameters=largest[1],
    )


def _metadata_digest(parent: ResolvedCheckpoint) -> str:
    """sha256: of a directory over names and sizes, the small files' bytes, and headers; of a commit over its list."""
    own = _files_digest(parent)
    return digest([own, _files_digest(parent.adapter)]) if parent.adapter else own


def _files_digest(parent: ResolvedCheckpoint | ResolvedAdapter) -> str:
    running = hashlib.sha256()
    if parent.snapshot:
        listed = ((name, parent.snapshot.files[name]) for name in parent.snapshot.deciding)
        for name, file in listed:
            running.update(f"{name}\0{file.size}\0{file.sha256 or file.blob}\0".encode())
        return running.hexdigest()
    for name in parent.deciding:
        path = parent.directory / name
        running.update(f"{name}\0{path.stat().st_size}\0".encode())
        running.update(
            _header(path)
            if path.suffix in _WEIGHTS and not is_module_file(name)
            else read_plain(path, _MOST_BESIDE, within=parent.directory)
        )
    for name in list_others(parent.directory):
        running.update(f"{name}\0".encode(errors="surrogateescape"))
    running.update(_stored_heads(parent.directory))
    return running.hexdigest()


def _stored_heads(directory: Path) -> bytes:
    """Return the output heads of a model whose config.json does not say that it has its own.

    This is the one question that the check answers from weights: whether a stored head is the embedding.
    """
    try:
        if ties_embeddings(read_json(directory / "config.json")) is False:
            return b""
        return "\0".join(filter(is_head, open_checkpoint(directory).tensors)).encode()
    except InvalidInput:  # An adapter, or a damaged checkpoint: the check itself reports that.
        return b""


def _header(path: Path) -> bytes:
    """The bytes of a weight file that say what is in it: a safetensors header; of other formats only the start."""
    with open_plain(path) as file:
        start = file.read(8)
        # A lying length is the checkpoint reader's to refuse; here it must only not exhaust the memory.
        length = min(int.from_bytes(start, "little"), os.fstat(file.fileno()).st_size, 1 << 27)
        return start + (file.read(length) if path.suffix == ".safetensors" else b"")

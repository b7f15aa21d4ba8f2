"""The compatibility check: everything that can be wrong with a merge, found from headers and configurations alone."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from merge_core import Checkpoint, Finding, Recipe, open_checkpoint, plan_merge, preflight
from merge_core.errors import Refused
from tasks.pin import MATTERS, Found
from tasks.stage import StageValue, home, stage

_WEIGHTS = (".safetensors", ".bin")


class Metadata(BaseModel):
    """What the check reads of one parent, as its identity: names and sizes of all files, content of the small ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ref: str
    digest: str


class Remark(BaseModel):
    """One finding, worst first: ``block`` stops the run, ``warn`` does not, ``info`` is for the record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    severity: Literal["block", "warn", "info"]
    where: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.found}"


class Compatibility(StageValue):
    """All findings at once, and the size of the job."""

    remarks: tuple[Remark, ...]
    tensors: int
    bytes_read: int
    bytes_written: int

    def blocking(self) -> tuple[Remark, ...]:
        return tuple(remark for remark in self.remarks if remark.severity == "block")

    def summary(self) -> str:
        if blocking := self.blocking():
            more = f" (and {len(blocking) - 1} more)" if len(blocking) > 1 else ""
            return f"{blocking[0]}{more}"
        warnings = sum(remark.severity == "warn" for remark in self.remarks)
        size = f"{self.tensors} tensors, {self.bytes_written / 1e6:,.1f} MB to write"
        return size + (f", {warnings} warnings" if warnings else "")

    def refusal(self) -> Refused | None:
        blocking = self.blocking()
        if not blocking:
            return None
        worst, *others = blocking
        also = "".join(f"\n  also: {remark}" for remark in others)
        return Refused(worst.where, found=worst.found + also, expected=worst.expected, remedy=worst.remedy)


def metadata(parents: Sequence[Found]) -> tuple[Metadata, ...]:
    """Identity of what the check will read; no weight is read for it."""
    return tuple(Metadata(ref=parent.ref, digest=_metadata_digest(parent.directory)) for parent in parents)


@stage("compat", version=1)
def check_compatibility(
    out: Path, recipe: Recipe, metadata: Sequence[Metadata], parents: Sequence[Found]
) -> Compatibility:
    """Findings about the recipe and its parents; blocks before any weight is read."""
    checkpoints = open_checkpoints(parents)
    findings = preflight(recipe, checkpoints)
    blocked = any(finding.severity == "block" for finding in findings)
    plan = None if blocked else plan_merge(recipe, checkpoints)
    return Compatibility(
        remarks=tuple(_remark(finding) for finding in findings),
        tensors=len(plan.jobs) if plan else 0,
        bytes_read=plan.bytes_read if plan else 0,
        bytes_written=plan.bytes_written if plan else 0,
    )


def require_disk(compatibility: Compatibility, directory: Path | None = None) -> None:
    """Refuse a merge that would fill the disk. Looks at the disk now, so it is no part of the cached check.

    Raises:
        Refused: when less is free than the merge writes, with a tenth to spare.
    """
    directory = directory or home()
    directory.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(directory).free, round(1.1 * compatibility.bytes_written)
    if free < needed:
        raise Refused(
            str(directory),
            found=f"{free / 1e9:.1f} GB free",
            expected=f"{needed / 1e9:.1f} GB for the merged checkpoint",
            remedy="free some space, or point MERGEGATE_HOME to a larger disk",
        )


def open_checkpoints(parents: Sequence[Found]) -> dict[str, Checkpoint]:
    """The parents' headers and configurations, by reference."""
    return {parent.ref: open_checkpoint(parent.directory) for parent in parents}


def _metadata_digest(directory: Path) -> str:
    """sha256 over names and sizes, the small files' bytes, and the safetensors headers."""
    running = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if not path.is_file() or path.suffix not in MATTERS:
            continue
        running.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        running.update(_header(path) if path.suffix in _WEIGHTS else path.read_bytes())
    return running.hexdigest()


def _header(path: Path) -> bytes:
    """The bytes of a weight file that say what is in it: a safetensors header; of other formats only the start."""
    with path.open("rb") as file:
        start = file.read(8)
        # A lying length is the checkpoint reader's to refuse; here it must only not exhaust the memory.
        length = min(int.from_bytes(start, "little"), os.fstat(file.fileno()).st_size, 1 << 27)
        return start + (file.read(length) if path.suffix == ".safetensors" else b"")


def _remark(finding: Finding) -> Remark:
    return Remark(
        severity=finding.severity,
        where=finding.where,
        found=finding.found,
        expected=finding.expected,
        remedy=finding.remedy,
    )

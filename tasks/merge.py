"""The merge stage: a recipe and its pinned parents into a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from merge_core import merge_weights, plan_merge
from merge_core.engine import start_or_resume
from merge_core.errors import Refused
from merge_core.store import Artifact, NotInKey
from merge_core.units import format_bytes
from tasks.checkpoints import Model, PinnedRecipe
from tasks.stage import StageValue, advance, device_kind, stage, versions

MERGED = "merge"  # what the merged model is called beside its parents


class MergeSettings(BaseModel):
    """How the recipe is carried out. What is merged stands in the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0, description="Seed of the random masks (DARE, DELLA).")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N.")


class Numerics(BaseModel):
    """What decides the last place of a result besides recipe and parents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    device: str  # the kind, 'cpu' or 'cuda': one unit in the last place may differ between kinds
    where: Annotated[str, NotInKey]  # which one: 'cuda:1'
    versions: dict[str, str]


class Merged(StageValue):
    """What was made. The artifact is the checkpoint in Hugging Face layout."""

    method: str
    tensors: int
    parameters: int
    bytes_written: int
    warnings: tuple[str, ...]  # what the health check on the way out found odd
    seconds: Annotated[float, NotInKey]
    weights: dict[str, str]  # sha256 of every file that was hashed while it was written

    def summary(self) -> str:
        rate = self.bytes_written / max(self.seconds, 1e-6)
        written = f"{format_bytes(self.bytes_written)} · {format_bytes(rate)}/s · {self.tensors} tensors"
        return written + (f" · {len(self.warnings)} warnings" if self.warnings else "")


def numerics(settings: MergeSettings) -> Numerics:
    """The part of the settings that belongs into a key, with ``auto`` resolved."""
    where = device_kind() if settings.device == "auto" else settings.device
    return Numerics(
        seed=settings.seed, device=where.partition(":")[0], where=where, versions=versions("torch", "numba")
    )


@stage("merge", version=2, hashes_of=lambda value: value.weights, resumable=True)
def merge(out: Path, pinned: PinnedRecipe, numerics: Numerics) -> Merged:
    """Carry out the recipe on its parents; goes on from the journal of a killed run.

    Raises:
        InvalidInput: when a parent holds NaN or infinity.
        Refused: when what came out is not healthy (NaN, infinities, a tensor of zeros).
    """
    plan = plan_merge(pinned.recipe, {parent.ref: parent.open() for parent in pinned.parents})
    start_or_resume(out, plan)
    record = merge_weights(
        plan,
        out,
        seed=numerics.seed,
        device=numerics.where,
        on_progress=lambda done, total: advance(done, total, "B"),
    )
    blocking = [finding for finding in record.findings if finding.severity == "block"]
    if blocking:
        worst = blocking[0]
        raise Refused(worst.where, found=worst.found, expected=worst.expected, remedy=worst.remedy)
    return Merged(
        method=record.method,
        tensors=record.tensors,
        parameters=record.parameters,
        bytes_written=record.bytes_written,
        warnings=tuple(f"{finding.where}: {finding.found}" for finding in record.findings),
        seconds=record.seconds,
        weights=dict(record.files),
    )


def merged_model(artifact: Artifact[Merged]) -> Model:
    """The merge as a model beside its parents."""
    files = tuple(sorted(artifact.files.items()))
    return Model(name=MERGED, digest=artifact.digest, directory=artifact.directory, files=files)

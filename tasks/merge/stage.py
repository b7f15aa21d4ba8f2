"""The merge stage: a recipe and its pinned parents into a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core import Recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.adapters import Combined, combine_adapters, open_adapter, write_adapter
from mergegate.merge_core.architecture.experts import MatchedLayer, match_experts
from mergegate.merge_core.checkpoint import Companions
from mergegate.merge_core.engine import start_or_resume
from mergegate.merge_core.errors import Refused
from mergegate.merge_core.files import state_directory
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.checkpoints import Model, PinnedAdapter, PinnedRecipe, adapted_digest
from mergegate.tasks.sandbox import hold_gpus
from mergegate.tasks.stage import StageValue, advance, device_kind, stage, versions
from mergegate.tasks.store import Artifact, NotInKey

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


class RouterDistance(BaseModel):
    """How the experts of a parent correspond to those of the donor, over all layers that have some.

    Top-k and softmax make much of small differences of routers, so this is said whether or not experts correspond.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str  # as the recipe writes it
    layers: int
    experts: int  # in one layer
    moved: int  # layers in which another order of experts fits better, or was made
    diagonal: float  # mean cosine of expert i and expert i, as they stand
    best: float  # of the best assignment
    routers: float  # mean cosine of router rows, as they were merged
    distance: float  # of the routers, over the length of the donor's; the largest of all layers


class Merged(StageValue):
    """What was made. The artifact is the checkpoint in Hugging Face layout."""

    method: str
    tensors: int
    parameters: int
    bytes_written: int
    warnings: tuple[str, ...]  # what the health check on the way out found odd
    seconds: Annotated[float, NotInKey]
    weights: dict[str, str]  # sha256 of every file that was hashed while it was written
    # Of parents that are mixtures of experts; empty elsewhere.
    experts: Annotated[tuple[RouterDistance, ...], Field(exclude_if=lambda experts: not experts)] = ()

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


@stage("merge", version=5, hashes_of=lambda value: value.weights, resumable=True)
def merge(out: Path, pinned: PinnedRecipe, numerics: Numerics) -> Merged:
    """Carry out the recipe on its parents; goes on from the journal of a killed run.

    Raises:
        InvalidInput: when a parent holds NaN or infinity.
        Refused: when what came out is not healthy (NaN, infinities, a tensor of zeros).
    """
    if pinned.recipe.output:
        return _combine(out, pinned, numerics)
    matched = match_experts(pinned.recipe, {parent.ref: parent.open() for parent in pinned.parents})
    plan = plan_merge(matched.recipe, matched.checkpoints)
    start_or_resume(out, plan)
    with nullcontext() if numerics.device == "cpu" else hold_gpus():
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
        warnings=(
            *(f"{model}: left out: {why}" for model, why in pinned.recipe.left_out.items()),
            *(f"{finding.where}: {finding.found}" for finding in (*matched.findings, *record.findings)),
        ),
        seconds=record.seconds,
        weights=dict(record.files),
        experts=router_distances(matched.layers),
    )


def router_distances(layers: Sequence[MatchedLayer]) -> tuple[RouterDistance, ...]:
    """What is known of single layers, by model."""
    found = []
    for model in dict.fromkeys(layer.model for layer in layers):
        own = [layer for layer in layers if layer.model == model]
        found.append(
            RouterDistance(
                model=model,
                layers=len(own),
                experts=max(layer.experts for layer in own),
                moved=sum(layer.moved > 0 for layer in own),
                diagonal=fmean(layer.diagonal for layer in own),
                best=fmean(layer.best for layer in own),
                routers=fmean(layer.routers for layer in own),
                distance=max(layer.distance for layer in own),
            )
        )
    return tuple(found)


def _combine(out: Path, pinned: PinnedRecipe, numerics: Numerics) -> Merged:
    """Carry out a recipe whose result is an adapter."""
    began = time.monotonic()
    state_directory(out)
    made = combine_parents(
        pinned.recipe,
        [(parent.ref, parent.directory, parent.adapter.directory) for parent in pinned.parents if parent.adapter],
        out,
        seed=numerics.seed,
        on_progress=lambda done, total: advance(done, total, "B"),
    )
    tensors = made.adapter.tensors().values()
    return Merged(
        method=pinned.recipe.merge_method,
        tensors=len(tensors),
        parameters=sum(tensor.numel() for tensor in tensors),
        bytes_written=sum(tensor.nbytes for tensor in tensors),
        warnings=(f"rank {pinned.recipe.output.rank}: {made.error:.2%} of the change is left out",)
        if pinned.recipe.output and pinned.recipe.output.rank
        else (),
        seconds=time.monotonic() - began,
        weights={},
    )


def combine_parents(
    recipe: Recipe,
    parents: Sequence[tuple[str, Path, Path]],
    out: Path,
    *,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> Combined:
    """Write the adapter that ``recipe`` makes into the directory ``out``, with the tokenizer of the first that has one.

    Args:
        parents: Of each parent with an adapter its reference, the directory of its model, and that of the adapter.
        Others: As of ``combine_adapters``.
    """
    adapters = {ref: open_adapter(adapter) for ref, _, adapter in parents}
    made = combine_adapters(
        recipe,
        open_checkpoint(parents[0][1]),
        adapters,
        out / "scratch",
        seed=seed,
        on_progress=on_progress,
    )
    write_adapter(made.adapter, out)
    own = next((adapter.companions for adapter in adapters.values() if adapter.companions.sources), Companions())
    for name in own:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(own.read(name))
    return made


def merged_model(artifact: Artifact[Merged], pinned: PinnedRecipe) -> Model:
    """The merge as a model beside its parents; of an adapter, with the model that it is for."""
    files = tuple(sorted(artifact.files.items()))
    if pinned.recipe.output:
        parent = next(one for one in pinned.parents if one.adapter)
        adapter = PinnedAdapter(ref=MERGED, directory=artifact.directory, revision=None, files=files)
        digest = adapted_digest(parent.digest, artifact.digest)
        own = {"name": MERGED, "ref": MERGED, "digest": digest, "adapter": adapter}
        return parent.model_copy(update={**own, "is_base": False, "is_merged": False})
    # Its code, if any, is that of the donor.
    donor = next((parent for parent in pinned.parents if parent.ref == str(pinned.recipe.donor)), None)
    runs_code = donor is not None and donor.runs_code
    return Model(name=MERGED, digest=artifact.digest, directory=artifact.directory, files=files, runs_code=runs_code)

"""Define the merge stage, which turns a recipe and its pinned parents into a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, Field

from mergegate.merge_core import Recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.adapters import FactoredAdapter, combine_adapters, open_adapter, write_adapter
from mergegate.merge_core.architecture.experts import MatchedLayer, match_experts
from mergegate.merge_core.checkpoint import Companions
from mergegate.merge_core.engine import start_or_resume
from mergegate.merge_core.errors import Refused
from mergegate.merge_core.files import state_directory
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.base.sandbox import acquire_gpus
from mergegate.tasks.base.stage import StageValue, advance, device_kind, stage, versions
from mergegate.tasks.base.store import Artifact, NotInKey
from mergegate.tasks.models.checkpoints import Model, PinnedAdapter, PinnedRecipe, adapted_digest

MERGED = "merge"  # reference of the merged model, next to those of its parents


class MergeSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of the merge computation. The recipe specifies the models and the method."""

    seed: int = Field(default=0, ge=0, description="Seed of the random masks (DARE, DELLA).")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N.")


class Numerics(BaseModel, frozen=True, extra="forbid"):
    """Settings and library versions that can change the last bits of a merge with the same recipe and parents."""

    seed: int
    device: str  # 'cpu' or 'cuda'; results may differ between them by one unit in the last place
    where: Annotated[str, NotInKey]  # device of this run, such as 'cuda:1'
    versions: dict[str, str]


class RouterDistance(BaseModel, frozen=True, extra="forbid"):
    """Correspondence between the experts of a parent and those of the donor, over all layers with experts.

    The summary includes it whether or not the experts correspond, because top-k and softmax amplify small differences
    between routers.
    """

    model: str  # reference as written in the recipe
    layers: int
    experts: int  # experts in one layer
    moved: int  # layers in which another order of experts fits better or was applied
    diagonal: float  # mean cosine of experts with equal numbers, in the original order
    best: float  # mean cosine in the best assignment
    routers: float  # mean cosine of the router rows as merged
    distance: float  # norm of the router difference divided by the donor's norm, largest of all layers


class RepairedRouting(BaseModel, frozen=True, extra="forbid"):
    """Effect of a router repair on the calibration texts, as means over layers and texts.

    Pairs contain the values before and after.
    """

    layers: int
    new_layers: int  # layers with a new router; the others keep the merged one
    divergence: tuple[float, float]  # from the routing of the parents, in nats
    agreement: tuple[float, float]  # share of the parents' experts that the merge selects too

    @property
    def sentences(self) -> str:
        """Description of the repair for reports."""
        return (
            f"The routers of the merge were fitted to those of its parents: {self.new_layers} of {self.layers} layers "
            f"have a new router. On the calibration texts, the merge selected {100 * self.agreement[0]:.1f} % of the "
            f"experts that the parents select, and now selects {100 * self.agreement[1]:.1f} %. The divergence of its "
            f"routing from theirs was {self.divergence[0]:.3g} nats and is now {self.divergence[1]:.3g} nats."
        )


class MergeSummary(StageValue):
    """Summary of a merge. The artifact is the checkpoint in Hugging Face layout."""

    method: str
    tensors: int
    parameters: int
    bytes_written: int
    warnings: tuple[str, ...]  # models left out, and findings of the health check and of expert matching
    seconds: Annotated[float, NotInKey]
    weights: dict[str, str]  # sha256 of each file that was hashed during writing
    # One entry per parent that is a mixture of experts.
    experts: Annotated[tuple[RouterDistance, ...], Field(exclude_if=lambda experts: not experts)] = ()
    # None unless the recipe has ``router_repair``.
    routers: Annotated[RepairedRouting | None, Field(exclude_if=lambda routers: routers is None)] = None

    def summary(self) -> str:
        rate = self.bytes_written / max(self.seconds, 1e-6)
        written = f"{format_bytes(self.bytes_written)} · {format_bytes(rate)}/s · {self.tensors} tensors"
        return written + (f" · {len(self.warnings)} warnings" if self.warnings else "")


def numerics(settings: MergeSettings) -> Numerics:
    """Return the settings and library versions that belong in a cache key, with the device ``auto`` resolved."""
    device = device_kind() if settings.device == "auto" else settings.device
    return Numerics(
        seed=settings.seed, device=device.partition(":")[0], where=device, versions=versions("torch", "numba")
    )


@stage("merge", version=6, hashes_of=lambda value: value.weights, resumable=True)
def merge(out: Path, pinned: PinnedRecipe, numerics: Numerics) -> MergeSummary:
    """Merge the parents as the recipe specifies, resuming from the journal of a killed run.

    Raises:
        InvalidInput: A parent contains NaN or infinity.
        Refused: The result is not healthy (NaN, infinity, or a tensor of zeros).
    """
    if pinned.recipe.output:
        return _combine(out, pinned, numerics)
    matched = match_experts(pinned.recipe, {parent.ref: parent.open() for parent in pinned.parents})
    plan = plan_merge(matched.recipe, matched.checkpoints)
    start_or_resume(out, plan)
    with nullcontext() if numerics.device == "cpu" else acquire_gpus():
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
    return MergeSummary(
        method=record.method,
        tensors=record.tensors,
        parameters=record.parameters,
        bytes_written=record.bytes_written,
        warnings=(
            *(f"{model}: left out: {reason}" for model, reason in pinned.recipe.left_out.items()),
            *(f"{finding.where}: {finding.found}" for finding in (*matched.findings, *record.findings)),
        ),
        seconds=record.seconds,
        weights=dict(record.files),
        experts=router_distances(matched.layers),
        routers=repaired_routing(pinned.recipe),
    )


def repaired_routing(recipe: Recipe) -> RepairedRouting | None:
    """Return the effect of the router repair of ``recipe``, or None if its routers stay as merged."""
    return RepairedRouting.model_validate(recipe.repaired, from_attributes=True) if recipe.repaired else None


def router_distances(layers: Sequence[MatchedLayer]) -> tuple[RouterDistance, ...]:
    """Return one summary per model of how its experts correspond to those of the donor in all layers."""
    distances = []
    for model in dict.fromkeys(layer.model for layer in layers):
        model_layers = [layer for layer in layers if layer.model == model]
        distances.append(
            RouterDistance(
                model=model,
                layers=len(model_layers),
                experts=max(layer.experts for layer in model_layers),
                moved=sum(layer.moved > 0 for layer in model_layers),
                diagonal=fmean(layer.diagonal for layer in model_layers),
                best=fmean(layer.best for layer in model_layers),
                routers=fmean(layer.routers for layer in model_layers),
                distance=max(layer.distance for layer in model_layers),
            )
        )
    return tuple(distances)


def _combine(out: Path, pinned_recipe: PinnedRecipe, numerics: Numerics) -> MergeSummary:
    began = time.monotonic()
    state_directory(out)
    combined = combine_parents(
        pinned_recipe.recipe,
        [
            (parent.ref, parent.directory, parent.adapter.directory)
            for parent in pinned_recipe.parents
            if parent.adapter
        ],
        out,
        seed=numerics.seed,
        on_progress=lambda done, total: advance(done, total, "B"),
    )
    tensors = combined.adapter.tensors().values()
    return MergeSummary(
        method=pinned_recipe.recipe.merge_method,
        tensors=len(tensors),
        parameters=sum(tensor.numel() for tensor in tensors),
        bytes_written=sum(tensor.nbytes for tensor in tensors),
        warnings=(f"rank {pinned_recipe.recipe.output.rank}: {combined.error:.2%} of the change is left out",)
        if pinned_recipe.recipe.output and pinned_recipe.recipe.output.rank
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
) -> FactoredAdapter:
    """Merge adapters and write the result to ``out``, with the tokenizer of the first adapter that has one.

    Each of ``parents`` is a reference, the directory of the model and the directory of its adapter. ``on_progress``
    receives the number of bytes done and the total.

    Raises:
        InvalidInput: An adapter does not match the model or contains unsupported changes, or the weights do not add up
            to 1 although the method requires it.
    """
    adapters = {ref: open_adapter(adapter) for ref, _, adapter in parents}
    combined = combine_adapters(
        recipe, open_checkpoint(parents[0][1]), adapters, out / "scratch", seed=seed, on_progress=on_progress
    )
    write_adapter(combined.adapter, out)
    companions = next((adapter.companions for adapter in adapters.values() if adapter.companions.sources), Companions())
    for name in companions:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(companions.read(name))
    return combined


def merged_model(artifact: Artifact[MergeSummary], pinned_recipe: PinnedRecipe) -> Model:
    """Return the merge as a model. If the merge is an adapter, the model is its base with the adapter."""
    files = tuple(sorted(artifact.files.items()))
    if pinned_recipe.recipe.output:
        parent = next(candidate for candidate in pinned_recipe.parents if candidate.adapter)
        adapter = PinnedAdapter(ref=MERGED, directory=artifact.directory, revision=None, files=files)
        digest = adapted_digest(parent.digest, artifact.digest)
        update = {"name": MERGED, "ref": MERGED, "digest": digest, "adapter": adapter}
        return parent.model_copy(update={**update, "is_base": False, "is_merged": False})
    # The merged model needs the donor's code if the donor runs code.
    donor = next((parent for parent in pinned_recipe.parents if parent.ref == str(pinned_recipe.recipe.donor)), None)
    runs_code = donor is not None and donor.runs_code
    return Model(name=MERGED, digest=artifact.digest, directory=artifact.directory, files=files, runs_code=runs_code)

"""Add everything to a recipe that must be measured before the merge can be planned.

The measurements are the distances between models, router rows from prompts, and statistics on calibration texts. New
routers (HARC) also need the merge. So the recipe is first merged as if it had no ``router_repair``, and this merge runs
on the text of each parent. Each measurement is a stage, so it is cached by content. A recipe that needs none of them
stays the same object.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from mergegate.merge_core import Recipe
from mergegate.merge_core.analysis import find_outliers, geometric_median, normalized_lengths_and_distances
from mergegate.merge_core.architecture import dtype_in
from mergegate.merge_core.checkpoint import open_importance, open_moments, read_header
from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.parsing import read_json
from mergegate.merge_core.recipe import (
    GateRows,
    InputMeasurements,
    RelativeDistance,
    RepairedRouters,
    select_models,
    value_for,
)
from mergegate.tasks.base.stage import Runtime, formats_without_units, runtime, store
from mergegate.tasks.merge.calibration import pin_calibration_texts
from mergegate.tasks.merge.gates import GateRequest, PromptPair, router_rows
from mergegate.tasks.merge.routers import FILES_OF_ROUTERS, RepairRequest, RouterRepairSummary, new_routers
from mergegate.tasks.merge.stage import Numerics, merge, merged_model
from mergegate.tasks.merge.statistics import importance_statistics, statistics_stage
from mergegate.tasks.merge.weight_comparison import ModelDistances, model_distances
from mergegate.tasks.models.checkpoints import (
    Model,
    PinnedCheckpoint,
    PinnedRecipe,
    apply_adapters,
    apply_adapters_outside_flow,
    find_applied_adapters,
)

FindModel: TypeAlias = Callable[[str], PinnedCheckpoint]
"""Function that returns the pinned model for a reference."""
CallStage: TypeAlias = Callable[[Any], Callable[..., Any]]
"""Function that turns a stage into the function that runs it: in a Prefect flow, without Prefect, or from the store."""


def _without_prefect(stage: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = stage.build
    return function


def prepare_recipe(recipe: Recipe, find: FindModel, *, in_flow: bool = False) -> Recipe:
    """Return ``recipe`` with all measurements that the merge plan needs, or ``recipe`` itself if it needs none.

    New routers are not among them, because they need the merge (:func:`with_new_routers`). With ``in_flow``, the
    measurements run as tasks of the current Prefect flow.

    Raises:
        InvalidInput: A model cannot be measured as the recipe requires, or the recipe leaves out all models.
    """
    apply = apply_adapters if in_flow else apply_adapters_outside_flow
    call: CallStage = (lambda stage: stage) if in_flow else _without_prefect
    return _with_measurements(recipe, find, lambda ref: apply([find(ref)])[0], call)


def select_named_parents(recipe: Recipe, parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, ...]:
    """Return the parents that a prepared recipe still names."""
    names = {str(ref) for ref in recipe.references()}
    return tuple(parent for parent in parents if parent.ref in names)


class _NotFound(Exception):
    """Signal that a measurement is not in the store."""


def find_prepared_recipe(recipe: Recipe, find: FindModel, numerics: Numerics) -> Recipe | None:
    """Return the recipe with its measurements and new routers without running any model, or None if any is missing."""

    def call_stored(stage: Any) -> Callable[..., Any]:
        def find_in_store(*inputs: object) -> Any:
            if (result := stage.find(*inputs)) is None:
                raise _NotFound
            return result

        return find_in_store

    def find_loadable(ref: str) -> PinnedCheckpoint:
        if not (loadable := find_applied_adapters([find(ref)])):
            raise _NotFound
        return loadable[0]

    try:
        recipe = _with_measurements(recipe, find, find_loadable, call_stored)
        return with_new_routers(recipe, find, numerics, call_stored)
    except _NotFound:
        return None


def _with_measurements(recipe: Recipe, find: FindModel, find_loadable: FindModel, call: CallStage) -> Recipe:
    """Return ``recipe`` with distances, router rows and statistics in all of its documents.

    ``find_loadable`` returns a model with its adapter applied, so that any library can load it.
    """
    recipe = recipe.map_documents(lambda document: _with_distances(document, find, call))
    recipe = recipe.map_documents(lambda document: _with_gates(document, find, call))
    return recipe.map_documents(lambda document: _with_statistics(document, find_loadable, call))


def _with_distances(recipe: Recipe, find: FindModel, call: CallStage) -> Recipe:
    """Return one document with its models filtered and weighted by distance, as its rule and its method require."""
    if not recipe.needs_distances or recipe.distances is not None:
        return recipe
    refs = [str(source.model) for source in recipe.sources if source.model != recipe.base]
    distances = call(model_distances)(find(str(recipe.base)), tuple(map(find, refs))).value
    return _apply_distances(recipe, refs, distances)


def _apply_distances(recipe: Recipe, refs: Sequence[str], distances: ModelDistances) -> Recipe:
    """Return one document without the models that its rule leaves out, and with weights for the others.

    ``refs`` are the references of its models without the base, in the order of ``distances``.
    """
    left_out = {
        refs[index]: f"{count:,} numbers that are not finite" for index, count in enumerate(distances.broken) if count
    }
    if left_out and recipe.leave_out_beyond is None:
        first = next(iter(left_out))
        raise InvalidInput(
            first,
            found=left_out[first],
            expected="finite numbers",
            remedy="remove the model, or set leave_out_beyond in the recipe",
        )
    remaining_indices = list(distances.sound)
    if recipe.leave_out_beyond is not None:
        outliers = find_outliers(distances.gram, recipe.leave_out_beyond) if distances.gram else {}
        left_out |= {
            refs[remaining_indices[row]]: f"its change is {ratio:.1f} times as long as the median one"
            for row, ratio in outliers.items()
        }
        remaining_indices = [index for row, index in enumerate(remaining_indices) if row not in outliers]
    if not remaining_indices:
        raise InvalidInput(
            recipe.location,
            found=f"all models are left out: {next(iter(left_out))}: {next(iter(left_out.values()))}",
            expected="at least one intact model",
        )
    shares = None
    if recipe.method.traits.weights_by_distance:
        rows = [distances.sound.index(index) for index in remaining_indices]
        gram = [[distances.gram[i][j] for j in rows] for i in rows]
        # The weight that the recipe gives to an entire model, regardless of tensor and layer.
        weight, own = recipe.method.parameter("weight"), {str(item.model): item.parameters for item in recipe.sources}
        weights = [
            float(value_for(weight, (own[refs[index]], recipe.parameters), "", 0.0)) if weight else 1.0
            for index in remaining_indices
        ]
        shares = dict(zip([refs[index] for index in remaining_indices], geometric_median(gram, weights), strict=True))
    lengths = normalized_lengths_and_distances(distances.gram) if distances.gram else []
    measured = dict(zip(distances.sound, lengths, strict=True))
    relative_distances = {}
    for index, ref in enumerate(refs):
        length, distance = measured.get(index, (None, None))
        relative_distances[ref] = RelativeDistance(length, distance, left_out.get(ref, ""))
    return select_models(recipe, relative_distances, shares)


def _with_gates(recipe: Recipe, find: FindModel, call: CallStage) -> Recipe:
    """Return one document with the router rows for its prompts."""
    mixture = recipe.mixture
    if mixture is None or not mixture.needs_prompts or mixture.gates is not None:
        return recipe
    experts = mixture.all_experts
    request = GateRequest(
        mode="hidden" if mixture.gate_mode == "hidden_last" else mixture.gate_mode,
        experts=tuple(PromptPair(positive=expert.positive, negative=expert.negative) for expert in experts),
    )
    rows = call(router_rows)(find(str(recipe.base)), request, runtime()).value
    gates = GateRows(rows.layers, rows.rows, rows.width, base64.b64decode(rows.data))
    # The model process is not trusted, so its rows are checked.
    values = np.frombuffer(gates.data, "<f4") if len(gates.data) % 4 == 0 else np.zeros(0)
    has_size = gates.rows == len(experts) and values.size == gates.layers * len(experts) * gates.width
    if not has_size or not np.isfinite(values).all():
        raise InvalidInput(
            f"router rows of {recipe.base}",
            found="rows of the wrong size, or NaN or infinity",
            expected=f"{len(experts)} finite rows per layer",
        )
    return replace(recipe, mixture=replace(mixture, gates=gates))


def _with_statistics(recipe: Recipe, find: FindModel, call: CallStage) -> Recipe:
    """Return one document with the statistics of its models on their texts."""
    if (stage := statistics_stage(recipe)) is None or recipe.measured is not None:
        return recipe
    measure, current_runtime, measured = call(stage), runtime(), {}
    for ref, text in tuple(pin_calibration_texts(recipe, store().hashes)):
        model = find(ref)
        artifact = measure(model, text, recipe.reading, _dtype_for(model, current_runtime), current_runtime)
        opened: dict[str, Any] = (
            {"importance": open_importance(artifact.directory)}
            if stage is importance_statistics
            else {"moments": open_moments(artifact.directory)}
        )
        measured[ref] = InputMeasurements(artifact.digest, text.sha256, **opened)
    return replace(recipe, measured=measured)


def _dtype_for(model: Model, runtime: Runtime) -> str:
    """Return ``auto``, or ``float32`` if the machine has no units for the model's own format."""
    own_dtype = ""
    with suppress(MergegateError):  # Loading the model reports the problem.
        own_dtype = dtype_in(read_json(model.directory / "config.json"))
    return "float32" if own_dtype in formats_without_units(runtime.device) else "auto"


def with_new_routers(recipe: Recipe, find: FindModel, numerics: Numerics, call: CallStage = _without_prefect) -> Recipe:
    """Return ``recipe`` with new routers for its result, or ``recipe`` itself if it has no ``router_repair``.

    Raises:
        InvalidInput: A text does not exist or cannot be used, or the merge cannot be run.
        Refused: The merge is not healthy before its routers are replaced.
    """
    if recipe.router_repair is None or recipe.repaired is not None:
        return recipe
    texts = tuple((find(ref), text) for ref, text in pin_calibration_texts(recipe, store().hashes))
    parents = tuple(find(str(reference)) for reference in recipe.references())
    plain = PinnedRecipe(replace(recipe, router_repair=None), parents)
    model = merged_model(call(merge)(plain, numerics), plain)
    current, request = runtime(), RepairRequest(texts, recipe.reading, recipe.router_repair)
    artifact = call(new_routers)(model, plain, request, _dtype_for(model, current), current)
    summary: RouterRepairSummary = artifact.value
    tensors = [tensor for file in sorted(artifact.directory.glob(FILES_OF_ROUTERS)) for tensor in read_header(file)]
    repaired = RepairedRouters(
        digest=artifact.digest,
        texts={parent.ref: text.sha256 for parent, text in texts},
        tensors={tensor.name: tensor for tensor in tensors},
        divergence=summary.mean("divergence"),
        agreement=summary.mean("agreement"),
        layers=len(summary.layers),
        new_layers=summary.new_layers,
    )
    return replace(recipe, repaired=repaired)

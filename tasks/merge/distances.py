"""Measure distances between models, for rules that leave models out or weight them.

mergegate reads all weights once. If some are not finite, it reads them again to find out which models contain them. The
results are cached by content::

    recipe = with_distances(recipe, find=lambda ref: pinned[ref])       # unchanged if no rule needs distances
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, TypeAlias

import numpy as np

from mergegate.merge_core import Recipe
from mergegate.merge_core.analysis import (
    NOT_FINITE,
    find_outliers,
    geometric_median,
    measure_interference,
    normalized_lengths_and_distances,
)
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.engine import count_infinite, count_non_finite
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe import RelativeDistance, select_models, value_for
from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.merge.weight_comparison import tensor_elements
from mergegate.tasks.stage import StageValue, advance, value_stage
from mergegate.tasks.store import NotInKey, StoredValue

_PIECE = 16 << 20


class ModelDistances(StageValue):
    """Inner products between the task vectors of whole models, in the order in which the models were passed."""

    models: Annotated[tuple[str, ...], NotInKey]
    broken: tuple[int, ...]  # count of NaN and infinite numbers in each model
    gram: tuple[tuple[float, ...], ...]  # products of the models without such numbers

    @property
    def sound(self) -> tuple[int, ...]:
        """Indices of the models without NaN or infinity, in the order of the rows in ``gram``."""
        return tuple(index for index, count in enumerate(self.broken) if not count)

    def summary(self) -> str:
        lengths = normalized_lengths_and_distances(self.gram) if self.gram else []
        parts = [f"{self.models[index]} {length:.1f}" for index, (length, _) in zip(self.sound, lengths, strict=True)]
        parts += [f"{self.models[index]} broken" for index, count in enumerate(self.broken) if count]
        return f"lengths over the median: {', '.join(parts)}"


Measure: TypeAlias = Callable[[PinnedCheckpoint, tuple[PinnedCheckpoint, ...]], StoredValue[ModelDistances]]


@value_stage("distances", version=2)
def model_distances(base: PinnedCheckpoint, models: tuple[PinnedCheckpoint, ...]) -> ModelDistances:
    """Return the inner products between the task vectors of ``models``, measured from ``base``.

    Models that contain NaN or infinity have no products. For them, only the count of such numbers is returned.

    Raises:
        InvalidInput: A file cannot be read, the base contains NaN or infinity, or there is nothing to compare.
    """
    checkpoints = [model.open() for model in models]
    broken = [0] * len(checkpoints)
    gram = _products(base, checkpoints)
    if gram is None:
        in_base = _non_finite(base.open())
        constants = {name for name, (_, is_constant) in in_base.items() if is_constant}
        if in_base.keys() == constants:  # A broken base also breaks the models that are adapters on it.
            broken = [_count_damage(checkpoint, constants) for checkpoint in checkpoints]
            gram = _products(
                base, [checkpoint for checkpoint, count in zip(checkpoints, broken, strict=True) if not count]
            )
        if gram is None and not all(broken):
            raise InvalidInput(
                f"{base.name} ({base.directory})",
                found="NaN or infinity",
                expected="a base with finite numbers, from which task vectors are measured",
                remedy="get the checkpoint again",
            )
    return ModelDistances(
        models=tuple(model.name for model in models), broken=tuple(broken), gram=tuple(tuple(row) for row in gram or ())
    )


def _products(base: PinnedCheckpoint, checkpoints: Sequence[Checkpoint]) -> Sequence[Sequence[float]] | None:
    """Return the inner products of the task vectors, or None if a number is not finite or there is no model.

    Raises:
        InvalidInput: A file cannot be read, or there is nothing to compare.
    """
    if not checkpoints:
        return None
    try:
        interference = measure_interference(
            base.open(), checkpoints, on_progress=lambda done, total: advance(done, max(total, 1), "B")
        )
    except InvalidInput:
        if not any(map(_non_finite, checkpoints)):  # Non-finite numbers can also leave nothing to compare.
            raise
        return None
    return None if any(item.reason == NOT_FINITE for item in interference.skipped) else interference.network_tally.gram


def _count_damage(checkpoint: Checkpoint, constants: Collection[str]) -> int:
    """Return the number of NaN and infinite values in a model, except in tensors that are ``constants`` of its base."""
    non_finite = _non_finite(checkpoint).items()
    return sum(count for name, (count, is_constant) in non_finite if not (is_constant and name in constants))


def _non_finite(checkpoint: Checkpoint) -> dict[str, tuple[int, bool]]:
    """Count the NaN and infinite values of each tensor of a model that has any.

    Overflows that a finite adapter causes count too. The second value is true if the tensor has only infinities, as the
    clip bounds of some networks do.
    """
    counts: dict[str, tuple[int, bool]] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype.kind != "float":
            continue
        elements = tensor_elements(tensor)
        size, count, infinite = tensor.dtype.size, 0, 0
        for first in range(0, tensor.numel, _PIECE // size):
            piece = np.empty(min(_PIECE, (tensor.numel - first) * size), np.uint8)
            elements(first, piece)
            count += count_non_finite(piece, tensor.dtype, fused=False)
            infinite += count_infinite(piece, tensor.dtype) if count else 0
        if count:
            counts[tensor.name] = count, infinite == tensor.numel
    return counts


def with_distances(recipe: Recipe, find: Callable[[str], PinnedCheckpoint], measure: Measure | None = None) -> Recipe:
    """Return ``recipe`` with its models filtered and weighted by distance, as its rule and its method require.

    ``find`` returns the pinned model for a reference. ``measure`` is :func:`model_distances` as a task of a flow, by
    default the same stage without Prefect.

    Raises:
        InvalidInput: No model remains, or a model contains NaN or infinity and no rule leaves it out.
    """

    def complete(document: Recipe) -> Recipe:
        if not document.needs_distances or document.distances is not None:
            return document
        refs = [str(source.model) for source in document.sources if source.model != document.base]
        models = tuple(find(ref) for ref in refs)
        distances = (measure or model_distances.build)(find(str(document.base)), models).value
        return _apply_distances(document, refs, distances)

    return recipe.map_documents(complete)


def _apply_distances(recipe: Recipe, refs: Sequence[str], distances: ModelDistances) -> Recipe:
    """Return one recipe document without the models that its rule leaves out, and with weights for the others.

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

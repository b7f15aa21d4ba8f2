"""How far the models of a merge are from each other, for rules that ask: who is left out, whose voice counts how much.

All weights are read once for it, and again where some are not finite: whose? What was found is kept by content::

    recipe = with_distances(recipe, find=lambda ref: pinned[ref])       # the same recipe where nothing is asked
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

import numpy as np

from mergegate.merge_core import Recipe
from mergegate.merge_core.analysis import (
    NOT_FINITE,
    find_outliers,
    geometric_median,
    measure_interference,
    normalized_lengths_and_distances,
)
from mergegate.merge_core.checkpoint import Checkpoint, DerivedTensor, StoredTensor, read_into
from mergegate.merge_core.engine import count_non_finite
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe import ModelPlace, select_models
from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.stage import StageValue, advance, value_stage
from mergegate.tasks.store import NotInKey, StoredValue

_PIECE = 16 << 20


class ModelDistances(StageValue):
    """Products of the task vectors of whole models, in the order in which they were asked."""

    models: Annotated[tuple[str, ...], NotInKey]
    broken: tuple[int, ...]  # numbers of each model that are not finite
    gram: tuple[tuple[float, ...], ...]  # of those of which all are

    @property
    def sound(self) -> tuple[int, ...]:
        """Positions of the models that ``gram`` speaks of."""
        return tuple(at for at, count in enumerate(self.broken) if not count)

    def summary(self) -> str:
        lengths = normalized_lengths_and_distances(self.gram) if self.gram else []
        said = [f"{self.models[at]} {length:.1f}" for at, (length, _) in zip(self.sound, lengths, strict=True)]
        said += [f"{self.models[at]} broken" for at, count in enumerate(self.broken) if count]
        return f"lengths over the median: {', '.join(said)}"


Measure: TypeAlias = Callable[[PinnedCheckpoint, tuple[PinnedCheckpoint, ...]], StoredValue[ModelDistances]]


@value_stage("distances", version=2)
def model_distances(base: PinnedCheckpoint, models: tuple[PinnedCheckpoint, ...]) -> ModelDistances:
    """Products of the task vectors of ``models`` from ``base``; of those that hold NaN or infinity only how many.

    Raises:
        InvalidInput: when a file cannot be read, or nothing can be compared.
    """
    opened = [model.open() for model in models]
    broken = [0] * len(opened)
    gram = _products(base, opened)
    if gram is None:
        if not _non_finite(base.open()):  # else what is an adapter on it would be blamed
            broken = [_non_finite(one) for one in opened]
            gram = _products(base, [one for one, count in zip(opened, broken, strict=True) if not count])
        if gram is None and not all(broken):
            raise InvalidInput(
                f"{base.name} ({base.directory})",
                found="numbers that are not finite",
                expected="a base that task vectors can be measured from",
                remedy="get the checkpoint again",
            )
    return ModelDistances(
        models=tuple(model.name for model in models),
        broken=tuple(broken),
        gram=tuple(tuple(row) for row in gram or ()),
    )


def _products(base: PinnedCheckpoint, opened: Sequence[Checkpoint]) -> Sequence[Sequence[float]] | None:
    """Of the task vectors of whole models; None where a number of one is not finite, or there is no model.

    Raises:
        InvalidInput: as :func:`model_distances`.
    """
    if not opened:
        return None
    try:
        found = measure_interference(
            base.open(), opened, on_progress=lambda done, total: advance(done, max(total, 1), "B")
        )
    except InvalidInput:
        if not any(map(_non_finite, opened)):  # or nothing was left to be compared
            raise
        return None
    return None if any(one.reason == NOT_FINITE for one in found.skipped) else found.whole.gram


def _non_finite(checkpoint: Checkpoint) -> int:
    """Numbers of a model that are none: also such that an adapter of sound numbers makes."""
    count = 0
    for tensor in checkpoint.tensors.values():
        if tensor.dtype.kind != "float":
            continue
        elements = tensor.open(_read) if isinstance(tensor, DerivedTensor) else partial(_read, tensor)
        size = tensor.dtype.size
        for first in range(0, tensor.numel, _PIECE // size):
            piece = np.empty(min(_PIECE, (tensor.numel - first) * size), np.uint8)
            elements(first, piece)
            count += count_non_finite(piece, tensor.dtype, fused=False)
    return count


def _read(tensor: StoredTensor, first: int, into: Any) -> None:
    with tensor.file.open("rb") as file:
        read_into(file.fileno(), into.data, tensor.offset + first * tensor.dtype.size, tensor.file)


def with_distances(recipe: Recipe, find: Callable[[str], PinnedCheckpoint], measure: Measure | None = None) -> Recipe:
    """``recipe`` without the models that its rule leaves out, and with the voices that its method gives to the others.

    Args:
        find: The pinned model of a reference.
        measure: :func:`model_distances`, as a task of a flow; None: the same without Prefect.

    Raises:
        InvalidInput: when no model is left, or one is broken and no rule leaves it out.
    """
    return recipe.map_documents(lambda document: _with_own(document, find, measure))


def _with_own(recipe: Recipe, find: Callable[[str], PinnedCheckpoint], measure: Measure | None) -> Recipe:
    if not recipe.needs_distances or recipe.places is not None:
        return recipe
    refs = [str(source.model) for source in recipe.sources if source.model != recipe.base]
    models = tuple(find(ref) for ref in refs)
    found = (measure or model_distances.build)(find(str(recipe.base)), models).value
    out = {refs[at]: f"{count:,} numbers that are not finite" for at, count in enumerate(found.broken) if count}
    if out and recipe.leave_out_beyond is None:
        worst = next(iter(out))
        raise InvalidInput(
            worst, found=out[worst], expected="numbers", remedy="remove it, or say leave_out_beyond in the recipe"
        )
    kept = list(found.sound)
    if recipe.leave_out_beyond is not None:
        far = find_outliers(found.gram, recipe.leave_out_beyond) if found.gram else {}
        out |= {
            refs[kept[at]]: f"its change is {times:.1f} times as long as the median one" for at, times in far.items()
        }
        kept = [at for number, at in enumerate(kept) if number not in far]
    if not kept:
        raise InvalidInput(
            recipe.where,
            found=f"no model is left: {next(iter(out))}: {next(iter(out.values()))}",
            expected="one at least that is sound",
        )
    shares = None
    if recipe.method.traits.by_distance:
        rows = [found.sound.index(at) for at in kept]
        gram = [[found.gram[i][j] for j in rows] for i in rows]
        voices = [recipe.model_weight(refs[at]) for at in kept]
        shares = dict(zip([refs[at] for at in kept], geometric_median(gram, voices), strict=True))
    around = dict(zip(found.sound, normalized_lengths_and_distances(found.gram) if found.gram else [], strict=True))
    places = {}
    for at, ref in enumerate(refs):
        length, apart = around.get(at, (None, None))
        places[ref] = ModelPlace(length, apart, out.get(ref, ""))
    return select_models(recipe, places, shares)

"""Add everything to a recipe that must be measured before the merge can be planned.

The measurements are the distances between models, router rows from prompts, and statistics on calibration texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mergegate.merge_core import Recipe
from mergegate.tasks.checkpoints import (
    PinnedCheckpoint,
    apply_adapters,
    apply_adapters_outside_flow,
    find_applied_adapters,
)
from mergegate.tasks.merge.distances import model_distances, with_distances
from mergegate.tasks.merge.gates import router_rows, with_gates
from mergegate.tasks.merge.router_repair import with_new_routers
from mergegate.tasks.merge.stage import Numerics
from mergegate.tasks.merge.statistics import with_statistics


def prepare_recipe(recipe: Recipe, find: Callable[[str], PinnedCheckpoint], *, in_flow: bool = False) -> Recipe:
    """Return ``recipe`` with all measurements that the merge plan needs, or ``recipe`` itself if it needs none.

    New routers are not among them, because they need the merge (:func:`.router_repair.with_new_routers`). ``find``
    returns the pinned model for a reference. With ``in_flow``, the measurements run as tasks of the current Prefect
    flow.

    Raises:
        InvalidInput: A model cannot be measured as the recipe requires, or the recipe leaves out all models.
    """

    def find_loadable(ref: str) -> PinnedCheckpoint:
        return (apply_adapters if in_flow else apply_adapters_outside_flow)([find(ref)])[0]

    recipe = with_distances(recipe, find, model_distances if in_flow else None)
    recipe = with_gates(recipe, find, router_rows if in_flow else None)
    return with_statistics(recipe, find_loadable, lambda stage: stage if in_flow else stage.build)


def select_named_parents(recipe: Recipe, parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, ...]:
    """Return the parents that a prepared recipe still names."""
    names = {str(ref) for ref in recipe.references()}
    return tuple(parent for parent in parents if parent.ref in names)


class _NotFound(Exception):
    """Signal that a measurement is not in the store."""


def find_prepared_recipe(recipe: Recipe, find: Callable[[str], PinnedCheckpoint], numerics: Numerics) -> Recipe | None:
    """Return the recipe with its measurements and new routers without running any model, or None if any is missing.

    ``find`` returns the pinned model for a reference.
    """

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
        recipe = with_distances(recipe, find, call_stored(model_distances))
        recipe = with_gates(recipe, find, call_stored(router_rows))
        recipe = with_statistics(recipe, find_loadable, call_stored)
        return with_new_routers(recipe, find, numerics, call_stored)
    except _NotFound:
        return None

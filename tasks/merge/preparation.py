"""What must be known of models before they are merged: how far they are from each other, router rows out of prompts,
what they show on texts."""

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
from mergegate.tasks.merge.statistics import with_statistics


def prepare_recipe(recipe: Recipe, find: Callable[[str], PinnedCheckpoint], *, in_flow: bool = False) -> Recipe:
    """``recipe`` with all that it wants to be found out before its plan; itself where that is nothing.

    Args:
        find: The pinned model of a reference.
        in_flow: Whether models are asked in tasks of the running flow; else without Prefect.

    Raises:
        InvalidInput: when a model cannot be asked what the recipe wants of it, or none is left.
    """

    def find_loadable(ref: str) -> PinnedCheckpoint:
        return (apply_adapters if in_flow else apply_adapters_outside_flow)([find(ref)])[0]

    recipe = with_distances(recipe, find, model_distances if in_flow else None)
    recipe = with_gates(recipe, find, router_rows if in_flow else None)
    return with_statistics(recipe, find_loadable, lambda stage: stage if in_flow else stage.build)


def select_named_parents(recipe: Recipe, parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, ...]:
    """Those of ``parents`` that a prepared recipe has not left out; without what is no model, but kept for it."""
    names = {str(ref) for ref in recipe.references()} - set(recipe.states)
    return tuple(parent for parent in parents if parent.ref in names)


class _NotFound(Exception):
    """Something is not in the store."""


def find_prepared_recipe(recipe: Recipe, find: Callable[[str], PinnedCheckpoint]) -> Recipe | None:
    """As :func:`prepare_recipe`, where all that it needs has been found out before; else None. No model is asked."""

    def known(stage: Any) -> Callable[..., Any]:
        def in_store(*inputs: object) -> Any:
            if (found := stage.find(*inputs)) is None:
                raise _NotFound
            return found

        return in_store

    def find_loadable(ref: str) -> PinnedCheckpoint:
        if not (whole := find_applied_adapters([find(ref)])):
            raise _NotFound
        return whole[0]

    try:
        recipe = with_distances(recipe, find, known(model_distances))
        recipe = with_gates(recipe, find, known(router_rows))
        return with_statistics(recipe, find_loadable, known)
    except _NotFound:
        return None

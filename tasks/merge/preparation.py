"""What must be asked of models before they are merged: router rows out of prompts, what flows through them on texts."""

from __future__ import annotations

from collections.abc import Callable

from merge_core import Recipe
from tasks.checkpoints import Model, PinnedCheckpoint, loadable, loadable_alone
from tasks.merge.gates import router_rows, with_gates
from tasks.merge.statistics import input_statistics, with_statistics


def prepared(recipe: Recipe, find: Callable[[str], Model], *, in_flow: bool = False) -> Recipe:
    """``recipe`` with all that it wants to be found out before its plan; itself where that is nothing.

    Args:
        find: The pinned model of a reference.
        in_flow: Whether models are asked in tasks of the running flow; else without Prefect.

    Raises:
        InvalidInput: when a model cannot be asked what the recipe wants of it.
    """

    def find_loadable(ref: str) -> Model:
        model = find(ref)
        if not isinstance(model, PinnedCheckpoint):
            return model
        return (loadable if in_flow else loadable_alone)([model])[0]

    recipe = with_gates(recipe, find, router_rows if in_flow else None)
    return with_statistics(recipe, find_loadable, input_statistics if in_flow else None)

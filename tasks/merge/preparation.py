"""What must be asked of models before they are merged: router rows out of prompts, what flows through them on texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from merge_core import Recipe
from tasks.checkpoints import Model, PinnedCheckpoint, loadable, loadable_alone, loadable_before
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


class _NotFound(Exception):
    """Something is not in the store."""


def prepared_before(recipe: Recipe, find: Callable[[str], Model]) -> Recipe | None:
    """As :func:`prepared`, where all that it needs has been found out before; else None. No model is asked."""

    def known(stage: Any) -> Callable[..., Any]:
        def in_store(*inputs: object) -> Any:
            if (found := stage.find(*inputs)) is None:
                raise _NotFound
            return found

        return in_store

    def find_loadable(ref: str) -> Model:
        model = find(ref)
        whole = loadable_before([model]) if isinstance(model, PinnedCheckpoint) else (model,)
        if not whole:
            raise _NotFound
        return whole[0]

    try:
        return with_statistics(with_gates(recipe, find, known(router_rows)), find_loadable, known(input_statistics))
    except _NotFound:
        return None

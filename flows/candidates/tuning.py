"""Set up a search for the scale (``lambda``) at which a merge is most certain of its answers. It needs no labels.

A plain method at its best scale comes close to elaborate methods at theirs, and the scale with the lowest prediction
entropy is close to the best scale on labeled data. Because a model can be certain and wrong, the winner is confirmed on
documents that no candidate saw, and judged by the gate before the release.

``mergegate tune`` and the remedy ``tune: scale`` use this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mergegate.flows.candidates.candidates import SearchedRecipe
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import find_method, merge_methods
from mergegate.merge_core.parsing import parse_yaml

if TYPE_CHECKING:
    from mergegate.tasks.sweep import SweepSettings

TUNE: Mapping[str, str] = {"tune": "scale"}  # as a remedy
SCALE = "lambda"  # key in recipes
# Keys that need distances between the models, or the finished merge.
_NOT_IN_TRIALS = ("leave_out_beyond", "router_repair")
_RANGE = 2.5  # factor below and above the written value


class TuningSize(NamedTuple):
    """Size of a search for a scale.

    ``trials`` is the number of candidates. ``search`` and ``confirmation`` are numbers of documents per task: for the
    search and for the confirmation test. The gate uses the remaining ones.
    """

    trials: int = 16
    search: int = 50
    confirmation: int = 100


def scale_search(
    recipe: SearchedRecipe, tasks: Sequence[str], size: TuningSize
) -> tuple[dict[str, Any], SweepSettings]:
    """Return the recipe with a placeholder for its scale, and the settings of a search on documents of ``tasks``."""
    from mergegate.tasks.sweep import SweepSettings  # Imported late, because most commands need no sweep.

    start = _scale_in(recipe.document, recipe.location)
    parameters = {**(recipe.document.get("parameters") or {}), SCALE: f"${SCALE}"}
    settings = SweepSettings.model_validate(
        {
            "parameters": {SCALE: {"type": "log", "low": start / _RANGE, "high": start * _RANGE, "start": start}},
            "objective": [{"task": task, "measure": "entropy"} for task in dict.fromkeys(tasks)],
            "documents": {"search": size.search, "confirmation": size.confirmation},
            "budget": {"trials": size.trials},
            "random_trials": 0,
        }
    )
    return {**recipe.document, "parameters": parameters}, settings


def has_searchable_scale(recipe: str) -> bool:
    """Return whether :func:`scale_search` accepts a recipe in YAML."""
    try:
        documents = parse_yaml(recipe, "recipe")
        return len(documents) == 1 and isinstance(documents[0], Mapping) and _scale_in(documents[0], "recipe") > 0
    except InvalidInput:
        return False


def _scale_in(recipe: Mapping[str, Any], location: str) -> float:
    """Return the factor by which the recipe multiplies the merged task vector. Raise InvalidInput unless it has one."""
    if "clients" in recipe:
        raise InvalidInput(location, found="a round of clients", expected="the same recipe in every run")
    method = find_method(recipe.get("merge_method"), f"{location}: merge_method")
    needs_more = [key for key in _NOT_IN_TRIALS if recipe.get(key) is not None]
    needs_more += [method.name] if method.traits.weights_by_distance else []
    if needs_more:
        raise InvalidInput(
            location,
            found=f"{needs_more[0]}, and a search for the scale",
            expected="a recipe that is merged in memory for every trial, with the same models",
            remedy=f"search without {needs_more[0]}",
        )
    parameter = method.parameter(SCALE)
    if parameter is None:
        scaled = ", ".join(name for name, candidate in merge_methods().items() if candidate.parameter(SCALE))
        raise InvalidInput(
            f"{location}: merge_method",
            found=f"{method.name}, which does not have '{SCALE}'",
            expected=f"a method with a scale: {scaled}",
            remedy="to average fine-tunes, use task_arithmetic with equal weights and their base",
        )
    values = list(_values_of(recipe))
    scale = (recipe.get("parameters") or {}).get(SCALE, parameter.default) if len(values) < 2 else values
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not scale > 0:
        raise InvalidInput(
            f"{location}: {SCALE}",
            found=f"{scale!r}",
            expected="one number above 0, in the top-level 'parameters' of the recipe",
            remedy="use mergegate sweep to search several numbers",
        )
    return float(scale)


def _values_of(node: Any) -> Iterator[Any]:
    """Yield every value of the scale anywhere in a recipe."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == SCALE:
                yield value
            else:
                yield from _values_of(value)
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _values_of(item)

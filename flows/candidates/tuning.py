"""The scale of a merge (``lambda``) at which it is surest of what it says, searched without right answers.

A plain method at its best scale comes close to elaborate ones at theirs, and the scale at which predictions have the
least entropy is close to the one that right answers would choose. A model may be sure and wrong, so this is a search
like any other: confirmed on documents that no candidate saw, and judged by the gate before it is released.

``mergegate tune`` asks for it, and the remedy ``tune: scale``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mergegate.flows.candidates.candidates import SearchedRecipe
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import find_method, merge_methods
from mergegate.merge_core.parsing import parse_yaml
from mergegate.tasks.sweep import SweepSettings

TUNE: Mapping[str, str] = {"tune": "scale"}  # as a remedy
SCALE = "lambda"  # as recipes call it
_RANGE = 2.5  # times smaller and larger than what is written


class TuningSize(NamedTuple):
    """How much a search for a scale may take.

    Args:
        trials: Candidates.
        search, confirmation: Documents of each task that the search looks at, and the confirmation; the gate has the
            others.
    """

    trials: int = 16
    search: int = 50
    confirmation: int = 100


def scale_search(
    recipe: SearchedRecipe, tasks: Sequence[str], size: TuningSize
) -> tuple[dict[str, Any], SweepSettings]:
    """The recipe with a hole where its scale stands, and what fills it, over the documents of ``tasks``.

    Raises:
        InvalidInput: for a recipe without one scale.
    """
    start = _scale_in(recipe.document, recipe.where)
    parameters = {**(recipe.document.get("parameters") or {}), SCALE: f"${SCALE}"}
    settings = SweepSettings.model_validate(
        {
            "parameters": {SCALE: {"type": "log", "low": start / _RANGE, "high": start * _RANGE, "start": start}},
            "objective": [{"task": task, "measure": "entropy"} for task in dict.fromkeys(tasks)],
            "documents": {"search": size.search, "confirmation": size.confirmation},
            "budget": {"trials": size.trials},
            "baseline": 0,
        }
    )
    return {**recipe.document, "parameters": parameters}, settings


def has_searchable_scale(recipe: str) -> bool:
    """Whether :func:`scale_search` would find what it searches for in a recipe as YAML."""
    try:
        documents = parse_yaml(recipe, "recipe")
        return len(documents) == 1 and isinstance(documents[0], Mapping) and _scale_in(documents[0], "recipe") > 0
    except InvalidInput:
        return False


def _scale_in(recipe: Mapping[str, Any], where: str) -> float:
    """What the recipe multiplies the merged task vector by.

    Raises:
        InvalidInput: when it has no such number, or several.
    """
    if "clients" in recipe:
        raise InvalidInput(where, found="a round of clients", expected="a recipe that is the same every night")
    method = find_method(recipe.get("merge_method"), f"{where}: merge_method")
    parameter = method.parameter(SCALE)
    if parameter is None:
        scaled = ", ".join(name for name, one in merge_methods().items() if one.parameter(SCALE))
        raise InvalidInput(
            f"{where}: merge_method",
            found=f"{method.name}, which has no '{SCALE}'",
            expected=f"a method whose result has a scale: {scaled}",
            remedy="an average of fine-tunes is task_arithmetic with the same weights, on their base",
        )
    everywhere = list(_values_of(recipe))
    said = (recipe.get("parameters") or {}).get(SCALE, parameter.default) if len(everywhere) < 2 else everywhere
    if isinstance(said, bool) or not isinstance(said, (int, float)) or not said > 0:
        raise InvalidInput(
            f"{where}: {SCALE}",
            found=f"{said!r}",
            expected="one number above 0, under the recipe's own 'parameters'",
            remedy="mergegate sweep searches for several numbers at once",
        )
    return float(said)


def _values_of(node: Any) -> Iterator[Any]:
    """Every value that the scale has anywhere in a recipe."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == SCALE:
                yield value
            else:
                yield from _values_of(value)
    elif isinstance(node, (list, tuple)):
        for one in node:
            yield from _values_of(one)

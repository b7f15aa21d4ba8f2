"""``mergegate tune``: the scale of a merge (``lambda``) at which it is surest of what it says, without right answers.

A plain method at its best scale comes close to elaborate ones at theirs, and the scale at which predictions have the
least entropy is close to the one that right answers would choose. A model may be sure and wrong, so this is a search
like any other: confirmed on documents that no candidate saw, and judged by the gate before it is released.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flows.profile import Profile
from merge_core.errors import InvalidInput
from merge_core.methods import find_method, merge_methods
from merge_core.parsing import parse_yaml
from tasks.sweep import SweepSettings, relocated

SCALE = "lambda"  # as recipes call it
_RANGE = 2.5  # times smaller and larger than what is written


def tuned_profile(profile: Profile, *, trials: int, search: int, confirmation: int) -> Profile:
    """``profile`` with a search for the scale of its merge, over the documents of its tasks.

    Args:
        trials: Candidates.
        search, confirmation: Documents of each task that the search looks at, and the confirmation; the gate has the
            others.

    Raises:
        InvalidInput: for a profile that searches already or has no task, and a recipe without one scale.
    """
    where = f"profile {profile.name}"
    if profile.sweep:
        raise InvalidInput(
            where, found="a section 'sweep'", expected="a recipe without holes", remedy="mergegate sweep does it"
        )
    if not profile.evaluate:
        raise InvalidInput(where, found="no tasks", expected="evaluate.tasks: what the merge is asked to be sure of")
    recipe = profile.searched_recipe()
    start = _scale_in(recipe.document, recipe.where)
    parameters = {**(recipe.document.get("parameters") or {}), SCALE: f"${SCALE}"}
    content = relocated({**recipe.document, "parameters": parameters}, recipe.directory, profile.root)
    tasks = tuple(dict.fromkeys(guard.task for guard in profile.evaluate.tasks))
    settings = SweepSettings.model_validate(
        {
            "parameters": {SCALE: {"type": "log", "low": start / _RANGE, "high": start * _RANGE, "start": start}},
            "objective": [{"task": task, "measure": "entropy"} for task in tasks],
            "documents": {"search": search, "confirmation": confirmation},
            "budget": {"trials": trials},
            "baseline": 0,
        }
    )
    return profile.model_copy(update={"sweep": settings}).with_recipe(content)


def has_a_scale(recipe: str) -> bool:
    """Whether :func:`tuned_profile` would find what it searches for in a recipe as YAML."""
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

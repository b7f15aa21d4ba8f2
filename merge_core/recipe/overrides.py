"""Change settings of a recipe, for example ``{density: 0.3}`` or ``{merge_method: ties, base_model: base}``.

The functions take and return the plain data of a recipe, which :func:`merge_core.load_recipe` then parses as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import LINEAR, Method, find_method
from mergegate.merge_core.recipe.training_run import RUN_KEYS

_SETTINGS = (
    "merge_method",
    "base_model",
    "models",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "tokenizer",
    "chat_template",
)
_PARAMETERS = "parameters"
# Parameters that set the scale of the merged change. A value that was tuned for one method is wrong for another.
_SCALE = ("lambda", "normalize", "rescale")
_TEXT_KEYS, _DISTANCE_KEY = ("text", "statistics"), "leave_out_beyond"


def apply_overrides(recipe: Mapping[str, Any], changes: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return ``recipe`` with ``changes`` applied, as plain data.

    A change sets a key of the recipe or a parameter of its method. If the recipe has a training run, it may also set
    ``window``, ``schedule`` and the other keys of the run. A changed parameter gets the new value everywhere:
    its values for single models, slices or modules are removed. If ``merge_method`` changes, parameters that the new
    method does not have are removed, and those that set the scale of the merged change (``lambda``, ``normalize``,
    ``rescale``) return to the defaults of the new method unless the change sets them.

    Raises:
        InvalidInput: There is no change, or a change is neither a setting nor a parameter.
    """
    if not changes:
        raise InvalidInput(location, found="no changes", expected="at least one setting or parameter")
    if recipe.get("experts") is not None and not recipe.get("models"):
        raise InvalidInput(
            location,
            found="mergegate cannot change the settings of a mixture of experts",
            expected="changes of a recipe that merges models",
            remedy="use a complete recipe instead",
        )
    keys = (*_SETTINGS, *RUN_KEYS) if "run" in recipe else _SETTINGS
    current = recipe.get("merge_method", LINEAR.name if "run" in recipe else None)
    method = find_method(changes.get("merge_method", current), f"{location}: merge_method")
    settings = {name: value for name, value in changes.items() if name in keys}
    top_level = {name: value for name, value in changes.items() if name not in (*keys, _PARAMETERS)}
    new = {**_parameters_in(changes, location), **top_level}
    for name in new:
        if method.parameter(name) is None:
            names = [*keys, *(parameter.name for parameter in method.parameters)]
            raise InvalidInput(
                location,
                found=f"{name!r}",
                expected=f"a setting of the recipe or a parameter of {method.name}",
                remedy=suggest(name, names),
            )
    is_switch = method.name != current
    dropped_names = frozenset((*new, *(_SCALE if is_switch else ())))
    result: dict[str, Any] = {**_without(dict(recipe), method, dropped_names=dropped_names), **settings}
    if is_switch and isinstance(result.get("models"), list):
        result["models"] = [_as_base(entry, method, result.get("base_model")) for entry in result["models"]]
    if parameters := {**_parameters_in(result, location), **new}:
        result[_PARAMETERS] = parameters
    return result


def fit_to_method(recipe: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return ``recipe`` without the parameters that its method does not have, as plain data.

    Use this after choosing one method in a recipe that was written for several. Such a recipe names a base because some
    of the methods need it. If the chosen method would merge the base like any other model, the base is removed too,
    unless it is listed among the models.

    Raises:
        InvalidInput: The method is unknown.
    """
    method = find_method(recipe.get("merge_method"), f"{location}: merge_method")
    result: dict[str, Any] = _without(dict(recipe), method, dropped_names=frozenset())
    if method.base == "ordinary" and isinstance(result.get("models"), list):
        models = [entry.get("model") if isinstance(entry, Mapping) else entry for entry in result["models"]]
        if result.get("base_model") not in models:
            result.pop("base_model", None)
    if isinstance(result.get("models"), list):
        result["models"] = [_as_base(entry, method, result.get("base_model")) for entry in result["models"]]
    return result


def _parameters_in(value: Mapping[str, Any], location: str) -> Mapping[str, Any]:
    parameters = value.get(_PARAMETERS) or {}
    if not isinstance(parameters, Mapping):
        raise InvalidInput(
            f"{location}: {_PARAMETERS}", found=f"{parameters!r:.60}", expected="a mapping of parameters"
        )
    return parameters


def _as_base(entry: Any, method: Method, base: object) -> Any:
    """Return a model entry; if the model is the base, without its text and its task-vector parameters."""
    if not isinstance(entry, Mapping) or base is None or entry.get("model") != base:
        return entry
    non_base = frozenset(parameter.name for parameter in method.parameters if parameter.scope == "non_base")
    remaining = _without(entry, method, dropped_names=non_base)
    return {key: inner for key, inner in remaining.items() if key not in _TEXT_KEYS}


def _without(value: Any, method: Method, dropped_names: frozenset[str]) -> Any:
    """Return ``value`` without settings that do not apply to the method.

    These are, at every level, ``dropped_names`` and the parameters that the method does not have; texts, if the method
    reads none; and distance rules, if the method has no base.
    """
    if isinstance(value, list):
        return [_without(item, method, dropped_names) for item in value]
    if not isinstance(value, Mapping):
        return value
    result = {}
    for key, inner in value.items():
        if key in _TEXT_KEYS and method.traits.reads_text is None:
            continue
        if key == _DISTANCE_KEY and method.base not in ("required", "optional"):
            continue
        if key != _PARAMETERS or not isinstance(inner, Mapping):
            result[key] = _without(inner, method, dropped_names)
            continue
        parameters = {n: v for n, v in inner.items() if n not in dropped_names and method.parameter(n) is not None}
        if parameters:
            result[key] = parameters
    return result

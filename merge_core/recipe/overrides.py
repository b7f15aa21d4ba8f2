"""A recipe with some of its settings changed: ``{density: 0.3}``, ``{merge_method: ties, base_model: base}``.

Pure: plain values of a recipe in, plain values out; what they mean is then read by :func:`merge_core.load_recipe` as
if a person had written them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import Method, find_method

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
_OF_TEXTS, _OF_DISTANCES = ("text", "statistics"), "leave_out_beyond"


def apply_overrides(recipe: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``recipe`` with ``changes``, as plain values.

    A change is a setting of the recipe, or a parameter of its method. A parameter then has that value everywhere: where
    the recipe gave it for one model, slice or module, that is taken away. With another ``merge_method``, parameters
    that the new method does not have are taken away.

    Args:
        recipe: One document, as its YAML says it.
        changes: At least one.
        where: What messages call the changes.

    Raises:
        InvalidInput: A change that is neither, or no change at all.
    """
    if not changes:
        raise InvalidInput(where, found="nothing", expected="a change of the recipe")
    if recipe.get("experts") is not None and not recipe.get("models"):
        raise InvalidInput(
            where,
            found="changes of a mixture of experts",
            expected="changes of a merge of models",
            remedy="name a whole recipe",
        )
    method = find_method(changes.get("merge_method", recipe.get("merge_method")), f"{where}: merge_method")
    settings = {name: value for name, value in changes.items() if name in _SETTINGS}
    new = {**_parameters_in(changes, where), **{k: v for k, v in changes.items() if k not in (*_SETTINGS, _PARAMETERS)}}
    for name in new:
        if method.parameter(name) is None:
            known = [*_SETTINGS, *(parameter.name for parameter in method.parameters)]
            raise InvalidInput(
                where,
                found=f"{name!r}",
                expected=f"a setting of a recipe, or a parameter of {method.name}",
                remedy=suggest(name, known) or "name a whole recipe for changes of another kind",
            )
    result: dict[str, Any] = {**_without(dict(recipe), method, dropped=frozenset(new)), **settings}
    if method.name != recipe.get("merge_method") and isinstance(result.get("models"), list):
        result["models"] = [_as_base(entry, method, result.get("base_model")) for entry in result["models"]]
    if everywhere := {**_parameters_in(result, where), **new}:
        result[_PARAMETERS] = everywhere
    return result


def fit_to_method(recipe: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``recipe`` without those parameters that its method does not have, as plain values: what is left of a recipe that
    was written for several methods when one of them is chosen. So is the base, where the method would merge it like any
    other model: among several methods it is there for those that need one, unless it is listed among the models too.

    Raises:
        InvalidInput: There is no such method.
    """
    method = find_method(recipe.get("merge_method"), f"{where}: merge_method")
    result: dict[str, Any] = _without(dict(recipe), method, dropped=frozenset())
    if method.base == "ordinary" and isinstance(result.get("models"), list):
        named = [entry.get("model") if isinstance(entry, Mapping) else entry for entry in result["models"]]
        if result.get("base_model") not in named:
            result.pop("base_model", None)
    if isinstance(result.get("models"), list):
        result["models"] = [_as_base(entry, method, result.get("base_model")) for entry in result["models"]]
    return result


def _parameters_in(value: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    found = value.get(_PARAMETERS) or {}
    if not isinstance(found, Mapping):
        raise InvalidInput(f"{where}: {_PARAMETERS}", found=f"{found!r:.60}", expected="parameters by name")
    return found


def _as_base(entry: Any, method: Method, base: object) -> Any:
    """A model of the recipe; if it is now the base, without what the new method has for all but the base."""
    if not isinstance(entry, Mapping) or base is None or entry.get("model") != base:
        return entry
    gone = frozenset(parameter.name for parameter in method.parameters if parameter.scope == "non_base")
    found = _without(entry, method, dropped=gone)
    return {key: inner for key, inner in found.items() if key not in _OF_TEXTS}


def _without(value: Any, method: Method, dropped: frozenset[str]) -> Any:
    """``value`` without what is replaced and without what the method does not have, in every ``parameters``; without
    texts that it does not read, and rules about a base that it has not."""
    if isinstance(value, list):
        return [_without(item, method, dropped) for item in value]
    if not isinstance(value, Mapping):
        return value
    result = {}
    for key, inner in value.items():
        if key in _OF_TEXTS and method.traits.reads_text is None:
            continue
        if key == _OF_DISTANCES and method.base not in ("required", "optional"):
            continue
        if key != _PARAMETERS or not isinstance(inner, Mapping):
            result[key] = _without(inner, method, dropped)
            continue
        kept = {name: v for name, v in inner.items() if name not in dropped and method.parameter(name) is not None}
        if kept:
            result[key] = kept
    return result

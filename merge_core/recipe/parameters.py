"""Parse ``parameters`` of a recipe, resolve them to one value per tensor, and change settings of a recipe.

A setting is a scalar, a gradient (a list of numbers along the layers), ``{value, filter}``, or a list of those.
:func:`parse_parameters` reads it once into a :class:`Setting`, and :func:`value_for` looks up the value for a tensor.

:func:`apply_overrides` changes settings, for example ``{density: 0.3}`` or ``{merge_method: ties, base_model: base}``,
in the plain data of a recipe, which :func:`merge_core.load_recipe` then parses as usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.errors import FindingLog, InvalidInput, suggest
from mergegate.merge_core.methods import LINEAR, Method, Parameter, Scalar, find_method
from mergegate.merge_core.recipe.keys import RECIPE_KEYS, known_mapping, refuse
from mergegate.merge_core.recipe.training_run import RUN_KEYS

_INT_LIMIT = 2**31  # No method needs more, and kernels cannot take integers of any size.
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


@dataclass(frozen=True)
class Condition:
    """A value or gradient for tensors whose name contains ``filter``. None and ``*`` match all tensors."""

    values: tuple[Scalar, ...]
    filter: str | None
    location: str

    def matches(self, tensor: str) -> bool:
        return self.filter is None or self.filter == "*" or self.filter in tensor


@dataclass(frozen=True)
class Setting:
    """Values of one parameter in one scope. The first matching condition counts. A faulty value has no conditions."""

    name: str
    conditions: tuple[Condition, ...]

    def canonical(self) -> list[list[Any]]:
        """Return the conditions as ``[[values, filter], ...]``."""
        return [[list(condition.values), condition.filter] for condition in self.conditions]


@dataclass(frozen=True)
class Parameters:
    """One ``parameters`` mapping in a recipe."""

    settings: tuple[Setting, ...] = ()

    def get(self, name: str) -> Setting | None:
        return next((setting for setting in self.settings if setting.name == name), None)

    def canonical(self) -> dict[str, Any]:
        return {setting.name: setting.canonical() for setting in sorted(self.settings, key=lambda item: item.name)}


def parse_parameters(
    value: object, method: Method, location: str, log: FindingLog, *, per_model: bool, is_base: bool = False
) -> Parameters:
    """Read one ``parameters`` mapping.

    Parameters that mergekit ignores cause warnings: those that the method does not have, shared parameters under a
    model, and task-vector parameters under the base. A faulty value is a blocking finding and counts as set.
    """
    if not isinstance(value, Mapping):
        raise refuse(value, location, "a mapping of parameters")
    names = [parameter.name for parameter in method.parameters]
    settings = []
    for name, content in value.items():
        parameter = method.parameter(str(name))
        key_location = f"{location}.{name}"
        if parameter is None:
            suggestion = suggest(str(name), names)
            remedy, expected = suggestion, ""
            if name in RECIPE_KEYS:
                remedy = "move it to the top level of the recipe"
            elif not suggestion.startswith("did you"):
                remedy, expected = "remove it", "one of " + ", ".join(names) if names else "no parameters"
            found = f"{method.name} does not read {str(name)!r:.60}, so it has no effect"
            log.warn(key_location, found=found, expected=expected, remedy=remedy)
        elif per_model and parameter.scope == "shared":
            log.warn(
                key_location,
                found=f"{name} has no effect in the parameters of a model",
                expected=f"one {name} for the whole merge",
                remedy="move it to the top-level 'parameters'",
            )
        elif is_base and parameter.scope == "non_base":
            log.warn(
                key_location,
                found=f"{name} has no effect in the parameters of the base model",
                expected=f"{name} for the other models, because the base has no task vector",
                remedy="remove it",
            )
        elif content != []:  # mergekit treats an empty list as not set.
            conditions: list[Condition] = []
            with log.collect():
                located = [(key_location, content)]
                if isinstance(content, list) and any(isinstance(item, Mapping) for item in content):
                    located = [(f"{key_location}[{index}]", item) for index, item in enumerate(content)]
                conditions = [_condition(item, parameter, at, log) for at, item in located]
            for index, condition in enumerate(conditions[:-1]):
                if condition.filter in (None, "*"):
                    log.warn(
                        f"{key_location}[{index}]",
                        found="a value for all tensors comes before other values",
                        expected="the value without a filter as the last one, because the first match counts",
                        remedy="move it to the end of the list",
                    )
                    del conditions[index + 1 :]
                    break
            settings.append(Setting(parameter.name, tuple(conditions)))
    return Parameters(tuple(settings))


def value_for(parameter: Parameter, scopes: Iterable[Parameters], tensor: str, t: float) -> Any:
    """Return the value of a parameter for a tensor: from the first scope with a matching condition, else the default.

    The most specific scope comes first. Gradients are evaluated at ``t``, a position along the layers from 0 to 1. The
    value is ``REQUIRED`` if no scope sets the parameter and it has no default.

    Raises:
        InvalidInput: A gradient of an ``int`` parameter has a fractional value at ``t``.
    """
    for scope in scopes:
        setting = scope.get(parameter.name)
        condition = next((item for item in setting.conditions if item.matches(tensor)), None) if setting else None
        if condition is None:
            continue
        values = condition.values
        if len(values) == 1:
            return values[0]
        if parameter.kind in ("bool", "choice", "switch"):
            return values[int(t * (len(values) - 1))]
        value = gradient(tuple(float(item) for item in values), t)
        if parameter.kind == "int" and not value.is_integer():
            raise InvalidInput(
                condition.location,
                found=f"the gradient has the value {value:g} at the relative depth {t:g}",
                expected=f"a whole number for {parameter.name}",
                remedy="use one value, or filters",
            )
        return int(value) if parameter.kind == "int" else value
    return parameter.default


def gradient(values: tuple[float, ...], t: float) -> float:
    """Return the linear interpolation between evenly spaced ``values`` at ``t``, from 0 (first) to 1 (last)."""
    position = t * (len(values) - 1)
    lower = min(int(position), len(values) - 1)
    upper = min(lower + 1, len(values) - 1)
    fraction = position - lower
    return (1 - fraction) * values[lower] + fraction * values[upper]


def _condition(content: object, parameter: Parameter, location: str, log: FindingLog) -> Condition:
    pattern = None
    if isinstance(content, Mapping):
        entry = known_mapping(content, location, ("value", "filter"), log)
        if "value" not in entry:
            raise InvalidInput(location, found="no 'value'", expected="{value: ..., filter: ...}")
        pattern = entry.get("filter") or None
        if pattern is not None and not isinstance(pattern, str):
            raise refuse(pattern, entry.location_of("filter"), "a part of a tensor name")
        content = entry.get("value")
    if isinstance(content, list):
        if not content:
            raise InvalidInput(location, found="an empty list", expected="a value or a gradient of values")
        values = tuple(_scalar(item, parameter, f"{location}[{index}]") for index, item in enumerate(content))
    else:
        values = (_scalar(content, parameter, location),)
    return Condition(values, pattern, location)


def _scalar(value: object, parameter: Parameter, location: str) -> Scalar:
    kind = parameter.kind
    result: Scalar | None = None
    if kind in ("choice", "switch") and isinstance(value, str) and value in parameter.choices:
        result = value
    elif kind in ("bool", "switch"):
        result = bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None
    elif kind != "choice" and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)  # YAML 1.1 reads 1e-5 as text.
            if math.isfinite(number) and (kind != "int" or (number.is_integer() and abs(number) < _INT_LIMIT)):
                result = int(number) if kind == "int" else number
    if result is None:
        # A value of None is often an indentation mistake: YAML reads a key with nothing below it as null.
        kinds = {"float": "a number", "int": "a whole number between -2**31 and 2**31", "bool": "true or false"}
        expected = kinds.get(kind, f"one of {parameter.range}")
        remedy = suggest(value, parameter.choices) if isinstance(value, str) else ""
        if isinstance(value, str) and value.startswith("$"):
            remedy = "list the values to search under 'sweep' of a profile; a sweep fills them in"
        raise InvalidInput(location, found=f"{value!r}", expected=expected, remedy=remedy)
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        low, high = parameter.minimum, parameter.maximum
        if (low is not None and result < low) or (high is not None and result > high):
            raise InvalidInput(location, found=f"{result:g}", expected=f"{parameter.range} for {parameter.name}")
    return result


def apply_overrides(recipe: Mapping[str, Any], changes: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return ``recipe`` with ``changes`` applied, as plain data.

    A change sets a key of the recipe or a parameter of its method. If the recipe has a training run, it may also set
    ``window``, ``schedule`` and the other keys of the run. A changed parameter gets the new value everywhere:
    its values for single models, slices or modules are removed. If ``merge_method`` changes, parameters that the new
    method does not have are removed, and those that set the scale of the merged change (``lambda``, ``normalize``,
    ``rescale``) return to the defaults of the new method unless the change sets them.
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
        raise refuse(parameters, f"{location}: {_PARAMETERS}", "a mapping of parameters")
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
        if key == _DISTANCE_KEY and not method.has_task_vectors:
            continue
        if key != _PARAMETERS or not isinstance(inner, Mapping):
            result[key] = _without(inner, method, dropped_names)
            continue
        parameters = {n: v for n, v in inner.items() if n not in dropped_names and method.parameter(n) is not None}
        if parameters:
            result[key] = parameters
    return result

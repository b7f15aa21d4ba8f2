"""From a recipe's ``parameters`` to one value per tensor: filters, gradients, and which scope wins.

A setting is a scalar, a gradient (a list of numbers along the layers), ``{value, filter}``, or a list of those. It is
read once into :class:`Setting`; :func:`value_for` then answers for a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from merge_core.errors import InvalidInput, suggest
from merge_core.methods import REQUIRED, Method, Parameter, Scalar


@dataclass(frozen=True)
class Condition:
    """A value, or a gradient of several, for tensors whose name contains ``filter`` (None or ``*``: all)."""

    values: tuple[Scalar, ...]
    filter: str | None
    where: str

    def matches(self, tensor: str) -> bool:
        """Whether the condition speaks about the tensor of that name."""
        return self.filter is None or self.filter == "*" or self.filter in tensor


@dataclass(frozen=True)
class Setting:
    """What one scope says about one parameter: the first condition that matches counts."""

    name: str
    conditions: tuple[Condition, ...]

    def canonical(self) -> list[list[Any]]:
        """JSON-able form that decides the result: ``[[values, filter], ...]``."""
        return [[list(condition.values), condition.filter] for condition in self.conditions]


@dataclass(frozen=True)
class Parameters:
    """One ``parameters`` mapping of a recipe."""

    settings: tuple[Setting, ...] = ()

    def __iter__(self) -> Any:
        return iter(self.settings)

    def get(self, name: str) -> Setting | None:
        """The setting of the parameter of that name."""
        return next((setting for setting in self.settings if setting.name == name), None)

    def canonical(self) -> dict[str, Any]:
        """JSON-able form that decides the result."""
        return {setting.name: setting.canonical() for setting in sorted(self.settings, key=lambda item: item.name)}


def parse_parameters(
    value: object, method: Method, where: str, *, per_model: bool, is_base: bool = False
) -> Parameters:
    """Read one ``parameters`` mapping.

    Args:
        value: As YAML gave it; None is an empty mapping.
        method: Whose parameters they are.
        where: Place of the mapping.
        per_model: Whether it stands at a model, where shared parameters mean nothing.
        is_base: Whether that model is the base, where ``non_base`` parameters mean nothing.

    Raises:
        InvalidInput: Unknown or misplaced parameter, value of the wrong type or out of range.
    """
    if value is None:
        return Parameters()
    if not isinstance(value, Mapping):
        raise InvalidInput(where, found=f"{value!r:.60}", expected="a mapping of parameters")
    settings = []
    for name, content in value.items():
        parameter = method.parameter(str(name))
        place = f"{where}.{name}"
        if parameter is None:
            known = [known.name for known in method.parameters]
            raise InvalidInput(
                place,
                found=f"{method.name} has no parameter {str(name)!r}",
                expected="a parameter of the merge method",
                remedy=suggest(str(name), known) if known else f"{method.name} takes no parameters",
            )
        if per_model and parameter.scope == "shared":
            raise InvalidInput(
                place,
                found=f"{name} at a model",
                expected=f"{name} is one value for the whole merge",
                remedy="move it to the top-level 'parameters' (or those of the slice)",
            )
        if is_base and parameter.scope == "non_base":
            raise InvalidInput(
                place,
                found=f"{name} at the base model",
                expected=f"{method.name} applies {name} to task vectors, and the base has none",
                remedy="remove it; list the base without parameters",
            )
        settings.append(_setting(content, parameter, place))
    return Parameters(tuple(settings))


def value_for(parameter: Parameter, scopes: Iterable[Parameters], tensor: str, t: float) -> Any:
    """Value of ``parameter`` for a tensor; the first scope with a matching condition wins, else the default.

    Args:
        parameter: Whose value.
        scopes: From the most to the least specific.
        tensor: Name that filters look at.
        t: Position along the layers, 0 to 1, where gradients are evaluated.

    Returns:
        The value, or ``REQUIRED`` when no scope has one and there is no default.

    Raises:
        InvalidInput: A gradient of an ``int`` parameter gives a fraction here.
    """
    for scope in scopes:
        setting = scope.get(parameter.name)
        for condition in setting.conditions if setting else ():
            if condition.matches(tensor):
                return _along(condition, parameter, t)
    return parameter.default


def gradient(values: tuple[float, ...], t: float) -> float:
    """Piecewise linear interpolation of evenly spaced ``values`` at ``t`` in [0, 1]."""
    position = t * (len(values) - 1)
    left = min(int(position), len(values) - 1)
    right = min(left + 1, len(values) - 1)
    fraction = position - left
    return (1 - fraction) * values[left] + fraction * values[right]


def _along(condition: Condition, parameter: Parameter, t: float) -> Scalar:
    values = condition.values
    if len(values) == 1:
        return values[0]
    if parameter.kind in ("bool", "choice", "switch"):
        return values[int(t * (len(values) - 1))]
    value = gradient(tuple(float(item) for item in values), t)
    if parameter.kind == "int":
        if not value.is_integer():
            raise InvalidInput(
                condition.where,
                found=f"the gradient gives {value:g} at {t:g} of the layers",
                expected=f"{parameter.name} is a whole number",
                remedy="use one value, or filters",
            )
        return int(value)
    return value


def _setting(content: object, parameter: Parameter, where: str) -> Setting:
    if isinstance(content, list) and any(isinstance(item, Mapping) for item in content):
        conditions = tuple(_condition(item, parameter, f"{where}[{index}]") for index, item in enumerate(content))
    else:
        conditions = (_condition(content, parameter, where),)
    for index, condition in enumerate(conditions[:-1]):
        if condition.filter in (None, "*"):
            raise InvalidInput(
                f"{where}[{index}]",
                found="a value for all tensors, before others",
                expected="the value without filter last: the first match counts",
                remedy="move it to the end of the list",
            )
    return Setting(parameter.name, conditions)


def _condition(content: object, parameter: Parameter, where: str) -> Condition:
    pattern: str | None = None
    if isinstance(content, Mapping):
        for key in content:
            if key not in ("value", "filter"):
                raise InvalidInput(
                    f"{where}.{key}",
                    found=f"unknown key {str(key)!r}",
                    expected="'value' and 'filter'",
                    remedy=suggest(str(key), ("value", "filter")),
                )
        if "value" not in content:
            raise InvalidInput(where, found="no 'value'", expected="{value: ..., filter: ...}")
        if content.get("filter") is not None:
            if not isinstance(content["filter"], str) or not content["filter"]:
                raise InvalidInput(
                    f"{where}.filter", found=f"{content['filter']!r}", expected="a part of a tensor name"
                )
            pattern = content["filter"]
        content = content["value"]
    if isinstance(content, list):
        if not content:
            raise InvalidInput(where, found="an empty list", expected="a value or a gradient of values")
        values = tuple(_scalar(item, parameter, f"{where}[{index}]") for index, item in enumerate(content))
    else:
        values = (_scalar(content, parameter, where),)
    return Condition(values, pattern, where)


def _scalar(value: object, parameter: Parameter, where: str) -> Scalar:
    read = {"float": _float, "int": _int, "bool": _bool, "choice": _choice, "switch": _switch}[parameter.kind]
    result = read(value, parameter)
    if result is None:
        # "value" is often an indentation slip: an empty mapping arrives here as None.
        kind = {"float": "a number", "int": "a whole number", "bool": "true or false"}.get(
            parameter.kind, f"one of {parameter.range}"
        )
        remedy = suggest(value, parameter.choices) if isinstance(value, str) and parameter.choices else ""
        if isinstance(value, str) and value.startswith("$"):
            remedy = "a value that is to be searched for is filled in by a sweep: say under 'sweep' what it may be"
        raise InvalidInput(where, found=f"{value!r}", expected=kind, remedy=remedy)
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        low, high = parameter.minimum, parameter.maximum
        if (low is not None and result < low) or (high is not None and result > high):
            raise InvalidInput(where, found=f"{result:g}", expected=f"{parameter.name} is {parameter.range}")
    return result


def _float(value: object, _: Parameter) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)  # YAML 1.1 reads 1e-5 as text.
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _int(value: object, parameter: Parameter) -> int | None:
    number = _float(value, parameter)
    return int(number) if number is not None and number.is_integer() else None


def _bool(value: object, _: Parameter) -> bool | None:
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return None


def _choice(value: object, parameter: Parameter) -> str | None:
    return value if isinstance(value, str) and value in parameter.choices else None


def _switch(value: object, parameter: Parameter) -> Scalar | None:
    chosen = _choice(value, parameter)
    return chosen if chosen is not None else _bool(value, parameter)


__all__ = ["REQUIRED", "Condition", "Parameters", "Setting", "gradient", "parse_parameters", "value_for"]

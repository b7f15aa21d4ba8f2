"""Map the free parameters of a recipe to coordinates in [0, 1], and points back to recipes.

A free parameter has one coordinate, or one per group of layers, per filter, or per combination of both. A point has a
value for each coordinate, by its name::

    density                one for all
    weight[2]              the third group of layers
    weight[self_attn]      tensors whose name contains it; weight[*]: all others
    weight[mlp:0]          both

Values are rounded before anything is measured. The recipe that is written down is therefore the recipe that was
measured, and equal recipes have the same key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.recipe import fit_to_method
from mergegate.tasks.store import digest
from mergegate.tasks.sweep.placeholders import Placeholder, fill, holes_in
from mergegate.tasks.sweep.settings import FreeParameter, SweepSettings, Value
from mergegate.tasks.sweep.trials import Point

# Digits after the decimal point. Narrow ranges get more, so that they have thousands of values. Logarithmic parameters
# get this many significant digits.
DIGITS = 4
_OTHERS = "*"  # name of the part with all tensors that no filter matches
_NEARLY = 1e-6


@dataclass(frozen=True)
class Coordinate:
    """One free number or choice.

    Args:
        parameter: Name of the parameter.
        free: Type, range and choices of the parameter.
        part: Filter, or ``*`` for all other tensors. None: the parameter has no filters.
        group: Group of layers, from 0. None: the parameter has no groups.
    """

    parameter: str
    free: FreeParameter
    part: str | None = None
    group: int | None = None

    @property
    def name(self) -> str:
        """Name of the coordinate in a point."""
        inner = ":".join(str(index) for index in (self.part, self.group) if index is not None)
        return f"{self.parameter}[{inner}]" if inner else self.parameter

    @property
    def choices(self) -> int:
        """Number of values, or 0 for a continuous coordinate."""
        if self.free.type == "category":
            return len(self.free.choices)
        return int(self.high - self.low) + 1 if self.free.type == "integer" else 0

    @property
    def low(self) -> float:
        return float(self.free.low or 0.0)

    @property
    def high(self) -> float:
        return float(self.free.high or 0.0)

    def encode(self, value: Value) -> float:
        """Return the position of ``value`` in [0, 1]. A choice is at the middle of its share."""
        if self.free.type == "category":
            return (_index(self.free.choices, value) + 0.5) / self.choices
        if self.free.type == "integer":
            return (float(value) - self.low + 0.5) / self.choices
        low, high, position = (
            math.log(x) if self.free.type == "log" else x for x in (self.low, self.high, float(value))
        )
        return (position - low) / (high - low)

    def decode(self, unit: float) -> Value:
        """Return the value at ``unit``, which is clipped to [0, 1]."""
        unit = min(max(float(unit), 0.0), 1.0)
        if self.choices:
            index = min(int(unit * self.choices), self.choices - 1)
            return self.free.choices[index] if self.free.type == "category" else int(self.low) + index
        if self.free.type == "log":
            value = math.exp(math.log(self.low) + unit * (math.log(self.high) - math.log(self.low)))
            rounded = float(f"{value:.{DIGITS - 1}e}")
        else:
            width = self.high - self.low
            rounded = round(self.low + unit * width, max(DIGITS, DIGITS - 1 - math.floor(math.log10(width))))
        return min(max(rounded, self.low), self.high)


@dataclass(frozen=True)
class Space:
    """Recipe with placeholders, and the coordinates that fill them. Create it with :func:`make_space`.

    Args:
        recipe: Recipe as parsed YAML.
        coordinates: Coordinates, in the order of the parameters in the profile.
        sums: Groups of coordinates whose values sum to one, by index.
        layers: Number of layers of the model. 0: unknown and not needed.
        where: Name of the recipe in error messages.
    """

    recipe: Mapping[str, Any]
    coordinates: tuple[Coordinate, ...]
    sums: tuple[tuple[int, ...], ...]
    layers: int
    where: str

    @property
    def start(self) -> Point:
        """Hand-written values, exactly as written."""
        return {coordinate.name: coordinate.free.start for coordinate in self.coordinates}

    def encode(self, point: Point) -> NDArray[np.float64]:
        """Return the position of ``point``, ``[coordinates]``, in [0, 1]."""
        return np.array([coordinate.encode(point[coordinate.name]) for coordinate in self.coordinates])

    def decode(self, unit: Sequence[float] | NDArray[np.float64]) -> Point:
        """Return the point at ``unit``, ``[coordinates]``. Values outside [0, 1] are clipped."""
        values = [
            coordinate.decode(float(position)) for coordinate, position in zip(self.coordinates, unit, strict=True)
        ]
        for group in self.sums:
            bounds = [(self.coordinates[i].low, self.coordinates[i].high) for i in group]
            for i, value in zip(group, summing_to_one([float(values[i]) for i in group], bounds), strict=True):
                values[i] = value
        return {coordinate.name: value for coordinate, value in zip(self.coordinates, values, strict=True)}

    def recipe_of(self, point: Point) -> dict[str, Any]:
        """Return the recipe with its placeholders filled, as a user would write it.

        If the method is one of the choices, parameters that the chosen method does not have are left out.

        Raises:
            InvalidInput: The method does not exist.
        """
        filled = fill(self.recipe, lambda name: self._value_in_recipe(name, point))
        is_method_free = isinstance(self.recipe.get("merge_method"), str) and self.recipe["merge_method"].startswith(
            "$"
        )
        return fit_to_method(filled, self.where) if is_method_free else filled

    def _value_in_recipe(self, parameter: str, point: Point) -> Any:
        coordinates = [coordinate for coordinate in self.coordinates if coordinate.parameter == parameter]
        parts = list(dict.fromkeys(coordinate.part for coordinate in coordinates))

        def along_layers(part: str | None) -> Any:
            values = [point[coordinate.name] for coordinate in coordinates if coordinate.part == part]
            if coordinates[0].group is None:
                return values[0]
            # A recipe spreads the values of a list evenly over the layers, so one value per layer sets each layer.
            return [values[layer * len(values) // self.layers] for layer in range(self.layers)]

        if parts == [None]:
            return along_layers(None)
        return [
            {"value": along_layers(part)} if part == _OTHERS else {"filter": part, "value": along_layers(part)}
            for part in parts
        ]


def start_recipe(recipe: Mapping[str, Any], settings: SweepSettings, where: str) -> dict[str, Any]:
    """Return the hand-written recipe, in which each placeholder is filled by its start value.

    A parameter with groups of layers or filters is filled by a single number, too.

    Raises:
        InvalidInput: A placeholder has no parameter.
    """
    for hole in holes_in(recipe, where):
        _require_parameter(hole, settings)
    return fill(recipe, lambda name: settings.parameters[name].start)


def recipe_key(recipe: Mapping[str, Any]) -> str:
    """Return the key of a recipe: 64 hex digits, the same for equal recipes."""
    return digest(recipe)


def make_space(recipe: Mapping[str, Any], settings: SweepSettings, layers: int | None, where: str) -> Space:
    """Return the space of the free parameters of ``recipe``.

    Args:
        recipe: Recipe as parsed YAML.
        layers: Number of layers of the merged model. None: unknown.
        where: Name of the recipe in error messages.

    Raises:
        InvalidInput: A placeholder has no parameter or the reverse, a range is empty, a start value is out of range,
            groups of layers are set for a model without layers, weights cannot sum to one, or a method does not exist.
    """
    holes = holes_in(recipe, where)
    for hole in holes:
        _require_parameter(hole, settings)
    for name, free in settings.parameters.items():
        location = f"sweep.parameters.{name}"
        matching = [hole for hole in holes if hole.name == name]
        if not matching:
            remedy = suggest(f"${name}", [f"${hole.name}" for hole in holes]) if holes else ""
            raise InvalidInput(
                location,
                found="a parameter that the recipe has no place for",
                expected=f"${name} in {where}",
                remedy=remedy,
            )
        _check(free, location)
        for hole in matching:
            if (free.filters and not hole.takes_filters) or (free.layers and not hole.takes_layers):
                raise InvalidInput(
                    hole.where,
                    found=f"${name}, which has a value for each {'filter' if free.filters else 'group of layers'}",
                    expected=f"it in place of a parameter's value: 'parameters: {{{name}: ${name}}}'",
                )
        if free.layers and (layers is None or free.layers > layers):
            raise InvalidInput(
                f"{location}.layers",
                found=f"{free.layers} groups of {'an unknown number of' if layers is None else layers} layers",
                expected="a layer in each group",
            )
    for hole in holes:
        # Check all methods now, not when the sampler first draws one of them.
        if hole.where == f"{where}: merge_method":
            for method in settings.parameters[hole.name].choices:
                fit_to_method({"merge_method": method}, f"sweep.parameters.{hole.name}.choices")
    coordinates = tuple(
        coordinate for name, free in settings.parameters.items() for coordinate in _coordinates(name, free)
    )
    sums = tuple(group for names in settings.sum_to_one for group in _sums(names, settings, coordinates))
    return Space(recipe, coordinates, sums, layers or 0, where)


def summing_to_one(values: Sequence[float], bounds: Sequence[tuple[float, float]]) -> list[float]:
    """Return the nearest values within ``bounds`` that sum to one, rounded to four digits.

    All values are shifted by the same amount and clipped to their bounds (the Euclidean projection on a simplex with
    bounds; Held, Wolfe & Crowder 1974, Math. Program. 6:62).

    Args:
        bounds: Lower and upper bound of each value. The lower bounds sum to at most one, the upper bounds to at least
            one.
    """
    original, (low, high) = np.asarray(values), np.asarray(bounds, dtype=np.float64).T
    least, most = float((original - high).min()), float((original - low).max())
    for _ in range(60):
        middle = (least + most) / 2
        if np.clip(original - middle, low, high).sum() > 1:
            least = middle
        else:
            most = middle
    exact = np.clip(original - (least + most) / 2, low, high) * 10**DIGITS
    units = np.round(exact).astype(int)
    # Correct the sum at the values with the largest rounding errors.
    missing = 10**DIGITS - int(units.sum())
    step = 1 if missing > 0 else -1
    room = np.where(step > 0, high * 10**DIGITS - units, units - low * 10**DIGITS) >= 1 - 1e-9
    for i in sorted(np.flatnonzero(room), key=lambda i: step * (units[i] - exact[i]))[: abs(missing)]:
        units[i] += step
    return [int(unit) / 10**DIGITS for unit in units]


def _require_parameter(hole: Placeholder, settings: SweepSettings) -> None:
    if hole.name not in settings.parameters:
        raise InvalidInput(
            hole.where,
            found=f"${hole.name}, of which sweep.parameters says nothing",
            expected="a parameter of that name",
            remedy=suggest(hole.name, settings.parameters),
        )


def _coordinates(name: str, free: FreeParameter) -> list[Coordinate]:
    parts: list[str | None] = [*free.filters, _OTHERS] if free.filters else [None]
    groups: list[int | None] = list(range(free.layers)) if free.layers else [None]
    return [Coordinate(name, free, part, group) for part in parts for group in groups]


def _check(free: FreeParameter, location: str) -> None:
    if free.type == "category":
        _check_category(free, location)
    else:
        _check_range(free, location)
    if free.layers and free.type not in ("float", "log"):
        raise InvalidInput(
            f"{location}.layers",
            found=f"groups of layers of a parameter of type {free.type}",
            expected="of float or log: what lies between two layers is computed from both",
            remedy="use filters",
        )
    if len(set(free.filters)) < len(free.filters) or {_OTHERS, ""} & set(free.filters):
        raise InvalidInput(
            f"{location}.filters",
            found=", ".join(map(repr, free.filters)),
            expected="different parts of tensors' names; all other tensors have a value of their own",
        )


def _check_category(free: FreeParameter, location: str) -> None:
    if free.low is not None or free.high is not None:
        raise InvalidInput(location, found="a category with low or high", expected="choices, under 'choices'")
    if not free.choices:
        raise InvalidInput(f"{location}.choices", found="nothing", expected="the choices of a category")
    # Compare texts, because 1 and True are equal in Python.
    if len({_value_text(choice) for choice in free.choices}) < len(free.choices):
        raise InvalidInput(f"{location}.choices", found=f"{list(free.choices)}", expected="each choice once")
    if _value_text(free.start) not in {_value_text(choice) for choice in free.choices}:
        raise InvalidInput(
            f"{location}.start",
            found=repr(free.start),
            expected="one of the choices",
            remedy=suggest(str(free.start), [str(choice) for choice in free.choices]),
        )


def _check_range(free: FreeParameter, location: str) -> None:
    if free.choices:
        raise InvalidInput(
            f"{location}.choices", found=f"choices of a {free.type}", expected="low and high, or type: category"
        )
    low, high, start = free.low, free.high, free.start
    if low is None or high is None:
        missing = "low" if low is None else "high"
        raise InvalidInput(f"{location}.{missing}", found="nothing", expected=f"the range of a {free.type}")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InvalidInput(location, found=f"low {low:g} and high {high:g}", expected="low below high")
    if free.type == "log" and low <= 0:
        raise InvalidInput(f"{location}.low", found=f"{low:g}", expected="above 0, of a logarithm")
    if isinstance(start, (str, bool)):
        raise InvalidInput(f"{location}.start", found=repr(start), expected="a number")
    if free.type == "integer" and not all(float(x).is_integer() for x in (low, high, start)):
        raise InvalidInput(location, found=f"low {low:g}, high {high:g}, start {start:g}", expected="whole numbers")
    if not low <= start <= high:
        raise InvalidInput(f"{location}.start", found=f"{start:g}", expected=f"a number from {low:g} to {high:g}")


def _sums(names: Sequence[str], settings: SweepSettings, coordinates: Sequence[Coordinate]) -> list[tuple[int, ...]]:
    """Return the groups of coordinates that sum to one: one group per group of layers and filter."""
    location = "sweep.sum_to_one"
    for name in names:
        if name not in settings.parameters:
            raise InvalidInput(
                location, found=repr(name), expected="names of parameters", remedy=suggest(name, settings.parameters)
            )
    frees = [settings.parameters[name] for name in names]
    joined = ", ".join(names)
    if len(set(names)) < max(2, len(names)) or any(free.type != "float" for free in frees):
        raise InvalidInput(location, found=joined, expected="two or more different parameters of type float")
    if any(sum(name in group for group in settings.sum_to_one) > 1 for name in names):
        raise InvalidInput(location, found=f"one of {joined} in two groups", expected="each parameter in one")
    if len({(free.layers, free.filters) for free in frees}) > 1:
        raise InvalidInput(location, found=joined, expected="the same layers and filters of all of them")
    lowest, highest, start = (sum(float(getattr(free, end)) for free in frees) for end in ("low", "high", "start"))
    if not lowest <= 1 <= highest:
        raise InvalidInput(
            location, found=f"{joined} from {lowest:g} to {highest:g} together", expected="a range that has 1 in it"
        )
    if abs(start - 1) > _NEARLY:
        raise InvalidInput(location, found=f"{joined} start at {start:g} together", expected="1")
    parts = dict.fromkeys(
        (coordinate.part, coordinate.group) for coordinate in coordinates if coordinate.parameter in names
    )
    return [
        tuple(
            i
            for i, coordinate in enumerate(coordinates)
            if coordinate.parameter in names and (coordinate.part, coordinate.group) == part
        )
        for part in parts
    ]


def _index(choices: Sequence[Value], value: Value) -> int:
    return [_value_text(choice) for choice in choices].index(_value_text(value))


def _value_text(value: Value) -> str:
    return repr(value) if isinstance(value, (str, bool)) else repr(float(value))

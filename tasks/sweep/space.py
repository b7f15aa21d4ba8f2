"""The space that is searched: what is free in a recipe, as coordinates between 0 and 1, and back to a recipe.

A free parameter has one coordinate, or one for each group of layers, for each filter, or for each of both. A point has
a value for each coordinate, by its name::

    density                one for all
    weight[2]              of the third group of layers
    weight[self_attn]      of tensors whose name has it; weight[*]: of all others
    weight[mlp:0]          both

Values are rounded before anything is measured, so the recipe that is written down is the one that was measured, and
equal recipes have one key.
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

DIGITS = 4  # after the point; of narrow ranges as many that there are thousands of values; of logarithms all digits
_OTHERS = "*"  # in place of a filter: tensors that no filter matches
_NEARLY = 1e-6


@dataclass(frozen=True)
class Coordinate:
    """One number or choice.

    Args:
        parameter: Whose it is.
        free: What it may be.
        part: Filter, ``*`` for all others; None: there are none.
        group: Group of layers, from 0; None: there are none.
    """

    parameter: str
    free: FreeParameter
    part: str | None = None
    group: int | None = None

    @property
    def name(self) -> str:
        """By which a point knows it."""
        inner = ":".join(str(one) for one in (self.part, self.group) if one is not None)
        return f"{self.parameter}[{inner}]" if inner else self.parameter

    @property
    def choices(self) -> int:
        """How many values there are; 0 where they are a continuum."""
        if self.free.type == "category":
            return len(self.free.among)
        return int(self.high - self.low) + 1 if self.free.type == "integer" else 0

    @property
    def low(self) -> float:
        return float(self.free.low or 0.0)

    @property
    def high(self) -> float:
        return float(self.free.high or 0.0)

    def encode(self, value: Value) -> float:
        """Where ``value`` lies in [0, 1]; of a choice the middle of its share."""
        if self.free.type == "category":
            return (_index(self.free.among, value) + 0.5) / self.choices
        if self.free.type == "integer":
            return (float(value) - self.low + 0.5) / self.choices
        low, high, at = (math.log(x) if self.free.type == "log" else x for x in (self.low, self.high, float(value)))
        return (at - low) / (high - low)

    def decode(self, unit: float) -> Value:
        """The value at ``unit``, which is drawn to [0, 1]."""
        unit = min(max(float(unit), 0.0), 1.0)
        if self.choices:
            index = min(int(unit * self.choices), self.choices - 1)
            return self.free.among[index] if self.free.type == "category" else int(self.low) + index
        if self.free.type == "log":
            value = math.exp(math.log(self.low) + unit * (math.log(self.high) - math.log(self.low)))
            rounded = float(f"{value:.{DIGITS - 1}e}")
        else:
            width = self.high - self.low
            rounded = round(self.low + unit * width, max(DIGITS, DIGITS - 1 - math.floor(math.log10(width))))
        return min(max(rounded, self.low), self.high)


@dataclass(frozen=True)
class Space:
    """A recipe with holes and what they may be. Made by :func:`make_space`.

    Args:
        recipe: One document, as YAML says it.
        coordinates: In the order in which parameters were written.
        sums: Coordinates whose values sum to one, by number.
        layers: Of the model; 0: not known, and not needed.
        where: What messages call the recipe.
    """

    recipe: Mapping[str, Any]
    coordinates: tuple[Coordinate, ...]
    sums: tuple[tuple[int, ...], ...]
    layers: int
    where: str

    @property
    def start(self) -> Point:
        """The hand-written values, exactly as they were written."""
        return {one.name: one.free.start for one in self.coordinates}

    def encode(self, point: Point) -> NDArray[np.float64]:
        """``[coordinates]``, in [0, 1]."""
        return np.array([one.encode(point[one.name]) for one in self.coordinates])

    def decode(self, unit: Sequence[float] | NDArray[np.float64]) -> Point:
        """The point at ``unit``, ``[coordinates]``; what lies outside [0, 1] is drawn to it."""
        values = [one.decode(float(at)) for one, at in zip(self.coordinates, unit, strict=True)]
        for group in self.sums:
            bounds = [(self.coordinates[i].low, self.coordinates[i].high) for i in group]
            for i, value in zip(group, summing_to_one([float(values[i]) for i in group], bounds), strict=True):
                values[i] = value
        return {one.name: value for one, value in zip(self.coordinates, values, strict=True)}

    def recipe_of(self, point: Point) -> dict[str, Any]:
        """The recipe with its holes filled, as a person could have written it.

        What the chosen method does not have is left out, where the method is one of the choices.

        Raises:
            InvalidInput: No such method.
        """
        filled = fill(self.recipe, lambda name: self._written(name, point))
        chosen = isinstance(self.recipe.get("merge_method"), str) and self.recipe["merge_method"].startswith("$")
        return fit_to_method(filled, self.where) if chosen else filled

    def _written(self, parameter: str, point: Point) -> Any:
        own = [one for one in self.coordinates if one.parameter == parameter]
        parts = list(dict.fromkeys(one.part for one in own))

        def along_layers(part: str | None) -> Any:
            values = [point[one.name] for one in own if one.part == part]
            if own[0].group is None:
                return values[0]
            # The values of a list are spread evenly over the layers: with one a layer, each layer has its own.
            return [values[layer * len(values) // self.layers] for layer in range(self.layers)]

        if parts == [None]:
            return along_layers(None)
        return [
            {"value": along_layers(part)} if part == _OTHERS else {"filter": part, "value": along_layers(part)}
            for part in parts
        ]


def start_recipe(recipe: Mapping[str, Any], settings: SweepSettings, where: str) -> dict[str, Any]:
    """The recipe as a person wrote it, with each hole filled by its start value: one number also where there will be
    several.

    Raises:
        InvalidInput: A hole of which nothing is said.
    """
    for hole in holes_in(recipe, where):
        _require_said(hole, settings)
    return fill(recipe, lambda name: settings.parameters[name].start)


def recipe_key(recipe: Mapping[str, Any]) -> str:
    """One for recipes that say the same: 64 hex digits."""
    return digest(recipe)


def make_space(recipe: Mapping[str, Any], settings: SweepSettings, layers: int | None, where: str) -> Space:
    """Read what is free in ``recipe``.

    Args:
        recipe: One document, as YAML says it.
        layers: Of the model that comes out; None: not known.
        where: What messages call the recipe.

    Raises:
        InvalidInput: A hole without a parameter or the reverse, a range without values, a start outside of it, groups
            of layers without layers, weights that cannot sum to one, a method that there is not.
    """
    holes = holes_in(recipe, where)
    for hole in holes:
        _require_said(hole, settings)
    for name, free in settings.parameters.items():
        place = f"sweep.parameters.{name}"
        mine = [hole for hole in holes if hole.name == name]
        if not mine:
            remedy = suggest(f"${name}", [f"${hole.name}" for hole in holes]) if holes else ""
            raise InvalidInput(
                place,
                found="a parameter that the recipe has no place for",
                expected=f"${name} in {where}",
                remedy=remedy,
            )
        _check(free, place)
        for hole in mine:
            if (free.filters and not hole.takes_filters) or (free.layers and not hole.takes_layers):
                raise InvalidInput(
                    hole.where,
                    found=f"${name}, which has a value for each {'filter' if free.filters else 'group of layers'}",
                    expected=f"it in place of a parameter's value: 'parameters: {{{name}: ${name}}}'",
                )
        if free.layers and (layers is None or free.layers > layers):
            raise InvalidInput(
                f"{place}.layers",
                found=f"{free.layers} groups of {'an unknown number of' if layers is None else layers} layers",
                expected="a layer in each group",
            )
    for hole in holes:
        # Now, and not when one of them is drawn for the first time.
        if hole.where == f"{where}: merge_method":
            for method in settings.parameters[hole.name].among:
                fit_to_method({"merge_method": method}, f"sweep.parameters.{hole.name}.among")
    coordinates = tuple(one for name, free in settings.parameters.items() for one in _coordinates(name, free))
    sums = tuple(same for names in settings.sum_to_one for same in _sums(names, settings, coordinates))
    return Space(recipe, coordinates, sums, layers or 0, where)


def summing_to_one(values: Sequence[float], bounds: Sequence[tuple[float, float]]) -> list[float]:
    """The nearest values within ``bounds`` that sum to one, to four digits: each moved by as much, and held at its
    bound (the Euclidean projection on a simplex with bounds; Held, Wolfe & Crowder 1974, Math. Program. 6:62).

    Args:
        bounds: Whose sums lie on the two sides of one.
    """
    at, (low, high) = np.asarray(values), np.asarray(bounds, dtype=np.float64).T
    least, most = float((at - high).min()), float((at - low).max())
    for _ in range(60):
        middle = (least + most) / 2
        if np.clip(at - middle, low, high).sum() > 1:
            least = middle
        else:
            most = middle
    exact = np.clip(at - (least + most) / 2, low, high) * 10**DIGITS
    units = np.round(exact).astype(int)
    # What rounding has added or taken goes to those that it was unkindest to.
    missing = 10**DIGITS - int(units.sum())
    step = 1 if missing > 0 else -1
    room = np.where(step > 0, high * 10**DIGITS - units, units - low * 10**DIGITS) >= 1 - 1e-9
    for i in sorted(np.flatnonzero(room), key=lambda i: step * (units[i] - exact[i]))[: abs(missing)]:
        units[i] += step
    return [int(unit) / 10**DIGITS for unit in units]


def _require_said(hole: Placeholder, settings: SweepSettings) -> None:
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


def _check(free: FreeParameter, place: str) -> None:
    if free.type == "category":
        _check_category(free, place)
    else:
        _check_range(free, place)
    if free.layers and free.type not in ("float", "log"):
        raise InvalidInput(
            f"{place}.layers",
            found=f"groups of layers of a parameter of type {free.type}",
            expected="of float or log: what lies between two layers is computed from both",
            remedy="use filters",
        )
    if len(set(free.filters)) < len(free.filters) or {_OTHERS, ""} & set(free.filters):
        raise InvalidInput(
            f"{place}.filters",
            found=", ".join(map(repr, free.filters)),
            expected="different parts of tensors' names; all other tensors have a value of their own",
        )


def _check_category(free: FreeParameter, place: str) -> None:
    if free.low is not None or free.high is not None:
        raise InvalidInput(place, found="a category with low or high", expected="choices, under 'among'")
    if not free.among:
        raise InvalidInput(f"{place}.among", found="nothing", expected="the choices of a category")
    # Of 1 and true the texts differ, and they are the same to Python.
    if len({_said(one) for one in free.among}) < len(free.among):
        raise InvalidInput(f"{place}.among", found=f"{list(free.among)}", expected="each choice once")
    if _said(free.start) not in {_said(one) for one in free.among}:
        raise InvalidInput(
            f"{place}.start",
            found=repr(free.start),
            expected="one of the choices",
            remedy=suggest(str(free.start), [str(one) for one in free.among]),
        )


def _check_range(free: FreeParameter, place: str) -> None:
    if free.among:
        raise InvalidInput(
            f"{place}.among", found=f"choices of a {free.type}", expected="low and high, or type: category"
        )
    low, high, start = free.low, free.high, free.start
    if low is None or high is None:
        missing = "low" if low is None else "high"
        raise InvalidInput(f"{place}.{missing}", found="nothing", expected=f"the range of a {free.type}")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InvalidInput(place, found=f"low {low:g} and high {high:g}", expected="low below high")
    if free.type == "log" and low <= 0:
        raise InvalidInput(f"{place}.low", found=f"{low:g}", expected="above 0, of a logarithm")
    if isinstance(start, (str, bool)):
        raise InvalidInput(f"{place}.start", found=repr(start), expected="a number")
    if free.type == "integer" and not all(float(x).is_integer() for x in (low, high, start)):
        raise InvalidInput(place, found=f"low {low:g}, high {high:g}, start {start:g}", expected="whole numbers")
    if not low <= start <= high:
        raise InvalidInput(f"{place}.start", found=f"{start:g}", expected=f"a number from {low:g} to {high:g}")


def _sums(names: Sequence[str], settings: SweepSettings, coordinates: Sequence[Coordinate]) -> list[tuple[int, ...]]:
    """Which coordinates sum to one because parameters do: those of one group of layers and one filter."""
    where = "sweep.sum_to_one"
    for name in names:
        if name not in settings.parameters:
            raise InvalidInput(
                where, found=repr(name), expected="names of parameters", remedy=suggest(name, settings.parameters)
            )
    frees = [settings.parameters[name] for name in names]
    said = ", ".join(names)
    if len(set(names)) < max(2, len(names)) or any(free.type != "float" for free in frees):
        raise InvalidInput(where, found=said, expected="two or more different parameters of type float")
    if any(sum(name in group for group in settings.sum_to_one) > 1 for name in names):
        raise InvalidInput(where, found=f"one of {said} in two groups", expected="each parameter in one")
    if len({(free.layers, free.filters) for free in frees}) > 1:
        raise InvalidInput(where, found=said, expected="the same layers and filters of all of them")
    least, most, start = (sum(float(getattr(free, end)) for free in frees) for end in ("low", "high", "start"))
    if not least <= 1 <= most:
        raise InvalidInput(
            where, found=f"{said} from {least:g} to {most:g} together", expected="a range that has 1 in it"
        )
    if abs(start - 1) > _NEARLY:
        raise InvalidInput(where, found=f"{said} start at {start:g} together", expected="1")
    parts = dict.fromkeys((one.part, one.group) for one in coordinates if one.parameter in names)
    return [
        tuple(i for i, one in enumerate(coordinates) if one.parameter in names and (one.part, one.group) == part)
        for part in parts
    ]


def _index(among: Sequence[Value], value: Value) -> int:
    return [_said(one) for one in among].index(_said(value))


def _said(value: Value) -> str:
    return repr(value) if isinstance(value, (str, bool)) else repr(float(value))

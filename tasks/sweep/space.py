"""Fill the placeholders of a recipe: map its free parameters to coordinates in [0, 1], and points back to recipes.

A placeholder such as ``$weight`` stands for a complete value, never for a part of a text. The value can be a number, a
method or the name of a model. It is a list if the parameter has a value for each group of layers or for each filter
(``parameters: {weight: $weight}``). The recipe of a soup has no placeholders: its models are the ingredients.

A free parameter has a single coordinate, or one for each group of layers, each filter, or each combination of both. A
point has a value for each coordinate, by name::

    density                all tensors
    weight[2]              the third group of layers
    weight[self_attn]      tensors whose name contains 'self_attn'; weight[*]: tensors that no filter matches
    weight[mlp:0]          tensors of the first group of layers whose name contains 'mlp'

Values are rounded before a candidate is scored, so the saved recipe is exactly the one that was scored.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.architecture import stacks
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import LINEAR
from mergegate.merge_core.recipe import fit_to_method, parse_reference
from mergegate.tasks.base.store import digest
from mergegate.tasks.sweep.settings import FreeParameter, Point, SweepSettings, Value

_PLACEHOLDER = re.compile(r"\$([A-Za-z_]\w*)")
_PARAMETERS = "parameters"
_PATH_KEYS = ("model", "base_model", "source_model", "tokenizer_source", "source", "path")


class Placeholder(NamedTuple):
    """Placeholder and its position in a recipe."""

    name: str  # without the dollar sign
    location: str  # 'models[0].parameters.weight'
    takes_filters: bool  # whether the value may be a list with an entry for each filter
    takes_layers: bool  # whether the value may be a list with an entry for each layer


@dataclass(frozen=True)
class SoupRecipe:
    """Recipe whose models are the ingredients of a soup. Create it with :func:`read_soup_recipe`."""

    document: Mapping[str, Any]  # as parsed YAML; its method is ``linear``
    names: tuple[str, ...]  # model of each ingredient, in the order of the recipe
    is_uniform: bool  # whether the recipe averages its models with equal weights

    @property
    def labels(self) -> tuple[str, ...]:
        """Short name of each ingredient for tables: the last part of its path, if this is different for each."""
        short = tuple(name.rstrip("/").rpartition("/")[2] for name in self.names)
        return short if len(set(short)) == len(short) else self.names

    def soup_of(self, indices: Collection[int]) -> dict[str, Any]:
        """Return the recipe of the average of the ingredients at ``indices``, with weight 1 for each.

        The ingredients are in the order of the recipe, so a set of ingredients has one recipe.
        """
        entries = [entry for index, entry in enumerate(self.document["models"]) if index in indices]
        models = [{**entry, _PARAMETERS: {**(entry.get(_PARAMETERS) or {}), "weight": 1.0}} for entry in entries]
        shared = {
            key: value
            for key, value in (self.document.get(_PARAMETERS) or {}).items()
            if key not in ("weight", "normalize")
        }
        replaced = {"models": models, _PARAMETERS: shared}
        recipe = {key: replaced.get(key, value) for key, value in self.document.items()}
        return recipe if shared else {key: value for key, value in recipe.items() if key != _PARAMETERS}


def read_soup_recipe(recipe: Mapping[str, Any], location: str) -> SoupRecipe:
    """Return the ingredients of a soup, which are the models of a linear recipe.

    ``recipe`` is parsed YAML in which a training run is already replaced with its checkpoints. ``location`` is its name
    in error messages.
    """
    if placeholder := next(find_placeholders(recipe, location), None):
        raise InvalidInput(
            placeholder.location,
            found=f"the placeholder ${placeholder.name} in the recipe of a soup",
            expected="a value, because a soup has no free parameters",
            remedy="write the value, or replace 'soup' with 'parameters'",
        )
    if (method := recipe.get("merge_method")) != LINEAR.name:
        raise InvalidInput(
            f"{location}: merge_method",
            found=f"{method!r:.60} in the recipe of a soup",
            expected=f"{LINEAR.name}, because a soup is an average",
            remedy=f"write 'merge_method: {LINEAR.name}'",
        )
    models = recipe.get("models") or []
    models = models if isinstance(models, list) else [models]
    is_valid = all(isinstance(entry, Mapping) and "model" in entry for entry in models)
    if len(models) < 2 or not is_valid:
        raise InvalidInput(
            f"{location}: models",
            found=f"{len(models)} models" if is_valid else "an entry without 'model'",
            expected="two or more models, the ingredients of the soup",
            remedy="list the models under 'models', or name a training run under 'run'",
        )
    names = [str(parse_reference(entry["model"], f"{location}: models")) for entry in models]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(
            f"{location}: models", found=f"{repeated} twice", expected="each ingredient once", remedy="remove one"
        )
    shared, *own = [entry.get(_PARAMETERS) or {} for entry in (recipe, *models)]
    if faulty := next((each for each in (shared, *own) if not isinstance(each, Mapping)), None):
        raise InvalidInput(f"{location}: {_PARAMETERS}", found=f"{faulty!r:.60}", expected="a mapping of parameters")
    weights = [each.get("weight", shared.get("weight")) for each in own]
    is_uniform = shared.get("normalize", True) is True and isinstance(weights[0], (int, float))
    return SoupRecipe(recipe, tuple(names), is_uniform and all(weight == weights[0] for weight in weights))


def find_placeholders(node: Any, recipe_name: str, path: tuple[str | int, ...] = ()) -> Iterator[Placeholder]:
    """Yield the placeholders in ``node``, a recipe or the part of it at ``path``, in order.

    Raise InvalidInput if a text starts with a dollar sign but is not a placeholder, or if a placeholder is a key.
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    location = f"{recipe_name}: {text.removeprefix('.')}"
    if isinstance(node, Mapping):
        for key, value in node.items():
            if isinstance(key, str) and key.startswith("$"):
                raise InvalidInput(
                    f"{location}.{key}" if path else f"{recipe_name}: {key}",
                    found=f"the placeholder {key!r} as a key",
                    expected="placeholders only as values",
                )
            yield from find_placeholders(value, recipe_name, (*path, str(key)))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from find_placeholders(value, recipe_name, (*path, index))
    elif isinstance(node, str) and node.startswith("$"):
        match = _PLACEHOLDER.fullmatch(node)
        if not match:
            raise InvalidInput(
                location,
                found=repr(node),
                expected="a placeholder that is the complete value: $ and a name of letters, digits and underscores",
            )
        is_parameter = path[-2:-1] == (_PARAMETERS,)
        # True in an entry ``{value: $weight, filter: mlp}`` of a list of such entries.
        is_filter_value = path[-1:] == ("value",) and _PARAMETERS in path[-4:-2]
        yield Placeholder(match[1], location, takes_filters=is_parameter, takes_layers=is_parameter or is_filter_value)


def fill_placeholders(recipe: Mapping[str, Any], value_of: Callable[[str], Any]) -> dict[str, Any]:
    """Return a deep copy of ``recipe`` in which ``value_of(name)`` replaces each placeholder."""

    def replace(node: Any) -> Any:
        if isinstance(node, str) and (match := _PLACEHOLDER.fullmatch(node)):
            return value_of(match[1])
        if isinstance(node, Mapping):
            return {key: replace(value) for key, value in node.items()}
        return [replace(item) for item in node] if isinstance(node, (list, tuple)) else node

    return {key: replace(value) for key, value in recipe.items()}


def relocate_recipe(recipe: Mapping[str, Any], before: Path, now: Path) -> dict[str, Any]:
    """Return ``recipe`` for another directory: rewrite paths relative to ``before`` as paths relative to ``now``.

    Only paths to directories that exist are rewritten.
    """

    def relocate(node: Any, key: str = "") -> Any:
        if isinstance(node, Mapping):
            return {name: relocate(value, str(name)) for name, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [relocate(item, key) for item in node]
        if isinstance(node, str) and key in _PATH_KEYS:
            return "+".join(
                os.path.relpath((before / path).absolute(), now.absolute())
                if path and not Path(path).is_absolute() and (before / path).is_dir()
                else path
                for path in node.split("+", 1)  # A model and its adapter.
            )
        return node

    return {name: relocate(value, str(name)) for name, value in recipe.items()}


# Digits after the decimal point, or more in narrow ranges, so that they have thousands of values. For logarithmic
# parameters, number of significant digits.
DIGITS = 4
_OTHERS = "*"  # name of the part with all tensors that no filter matches


@dataclass(frozen=True)
class Coordinate:
    """Free number or choice: one dimension of a search space."""

    parameter: str
    free: FreeParameter  # type, range and choices
    part: str | None = None  # filter, or ``*`` for tensors that no filter matches; None: there are no filters
    group: int | None = None  # group of layers, from 0; None: there are no groups

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
        """Return the position of ``value`` in [0, 1]. A choice is in the middle of its part of this range."""
        if self.free.type == "category":
            texts = [_value_text(choice) for choice in self.free.choices]
            return (texts.index(_value_text(value)) + 0.5) / self.choices
        if self.free.type == "integer":
            return (float(value) - self.low + 0.5) / self.choices
        low, high, position = (
            math.log(x) if self.free.type == "log" else x for x in (self.low, self.high, float(value))
        )
        return (position - low) / (high - low)

    def decode(self, unit: float) -> Value:
        """Return the value at position ``unit``, which is clipped to [0, 1]."""
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
    """Recipe with placeholders, and the coordinates that fill them. Create it with :func:`make_space`."""

    recipe: Mapping[str, Any]  # as parsed YAML
    coordinates: tuple[Coordinate, ...]  # in the order of the parameters in the profile
    sums: tuple[tuple[int, ...], ...]  # groups of coordinates whose values sum to one, as indices
    layers: int  # of the model, or 0 if unknown
    name: str  # of the recipe in error messages

    @property
    def start(self) -> Point:
        """Hand-written values, not rounded."""
        return {coordinate.name: coordinate.free.start for coordinate in self.coordinates}

    def encode(self, point: Point) -> NDArray[np.float64]:
        """Return the positions of the values of ``point`` in [0, 1], as ``[coordinates]``."""
        return np.array([coordinate.encode(point[coordinate.name]) for coordinate in self.coordinates])

    def decode(self, unit: Sequence[float] | NDArray[np.float64]) -> Point:
        """Return the point at the positions ``unit``, ``[coordinates]``, which are clipped to [0, 1]."""
        values = [
            coordinate.decode(float(position)) for coordinate, position in zip(self.coordinates, unit, strict=True)
        ]
        for group in self.sums:
            bounds = [(self.coordinates[i].low, self.coordinates[i].high) for i in group]
            for i, value in zip(group, project_to_sum_one([float(values[i]) for i in group], bounds), strict=True):
                values[i] = value
        return {coordinate.name: value for coordinate, value in zip(self.coordinates, values, strict=True)}

    def fill_recipe(self, point: Point) -> dict[str, Any]:
        """Return the recipe with the values of ``point`` in place of its placeholders.

        If the method is searched too, parameters that the chosen method does not have are left out.
        """

        def value_in_recipe(parameter: str) -> Any:
            coordinates = [coordinate for coordinate in self.coordinates if coordinate.parameter == parameter]
            values_by_part: dict[str | None, Any] = {}
            for part in dict.fromkeys(coordinate.part for coordinate in coordinates):
                values = [point[coordinate.name] for coordinate in coordinates if coordinate.part == part]
                # A recipe spreads the values of a list evenly over the layers, so one value per layer sets each layer.
                spread = [values[layer * len(values) // self.layers] for layer in range(self.layers)]
                values_by_part[part] = values[0] if coordinates[0].group is None else spread
            if list(values_by_part) == [None]:
                return values_by_part[None]
            return [
                {"value": value} if part == _OTHERS else {"filter": part, "value": value}
                for part, value in values_by_part.items()
            ]

        recipe = fill_placeholders(self.recipe, value_in_recipe)
        return fit_to_method(recipe, self.name) if str(self.recipe.get("merge_method")).startswith("$") else recipe


def enumerate_recipes(recipe: Mapping[str, Any], settings: SweepSettings) -> Iterator[dict[str, Any]]:
    """Yield the start recipe with one choice replaced, for each choice of each category.

    Together with the start recipe, these recipes name all models and methods of all candidates.
    """
    # The number of layers is not known here. One layer per group suffices to fill the recipe.
    layers = max((free.layers or 1 for free in settings.parameters.values()), default=1)
    space = make_space(recipe, settings, layers, "recipe")
    for coordinate in space.coordinates:
        for choice in coordinate.free.choices:
            if choice != space.start[coordinate.name]:
                yield space.fill_recipe({**space.start, coordinate.name: choice})


def count_layers(names: Iterable[str]) -> int | None:
    """Return the number of layers of a model with these tensor names, or None if it has no layers.

    If the model has several stacks of layers, the deepest stack counts, because lists of values are spread over it.
    """
    return max(stacks(names).values(), default=None)


def start_recipe(recipe: Mapping[str, Any], settings: SweepSettings, name: str) -> dict[str, Any]:
    """Return the recipe with one start value in place of each placeholder, even with filters or groups of layers."""
    for placeholder in find_placeholders(recipe, name):
        _require_parameter(placeholder, settings)
    return fill_placeholders(recipe, lambda parameter: settings.parameters[parameter].start)


def recipe_key(recipe: Mapping[str, Any]) -> str:
    """Return the digest of a recipe: 64 hex digits, the same for equal recipes."""
    return digest(recipe)


def make_space(recipe: Mapping[str, Any], settings: SweepSettings, layers: int | None, recipe_name: str) -> Space:
    """Return the space of the free parameters of ``recipe``, whose merged model has ``layers`` layers if known.

    Raises:
        InvalidInput: A placeholder has no parameter, a parameter has no placeholder or is not valid, or a method does
            not exist.
    """
    placeholders = list(find_placeholders(recipe, recipe_name))
    for placeholder in placeholders:
        _require_parameter(placeholder, settings)
    coordinates: list[Coordinate] = []
    for name, free in settings.parameters.items():
        location = f"sweep.parameters.{name}"
        matching = [placeholder for placeholder in placeholders if placeholder.name == name]
        if not matching:
            raise InvalidInput(
                location,
                found="a parameter that the recipe does not use",
                expected=f"the placeholder ${name} in {recipe_name}",
                remedy=suggest(f"${name}", [f"${item.name}" for item in placeholders]),
            )
        _check_parameter(free, location)
        for placeholder in matching:
            if (free.filters and not placeholder.takes_filters) or (free.layers and not placeholder.takes_layers):
                raise InvalidInput(
                    placeholder.location,
                    found=f"${name}, which has a value for each {'filter' if free.filters else 'group of layers'}",
                    expected=f"the placeholder as the value of a parameter: 'parameters: {{{name}: ${name}}}'",
                )
        if free.layers and (layers is None or free.layers > layers):
            raise InvalidInput(
                f"{location}.layers",
                found=f"{free.layers} groups for {'an unknown number of' if layers is None else layers} layers",
                expected="at least one layer per group",
            )
        parts: list[str | None] = [*free.filters, _OTHERS] if free.filters else [None]
        groups: list[int | None] = list(range(free.layers)) if free.layers else [None]
        coordinates += [Coordinate(name, free, part, group) for part in parts for group in groups]
    for placeholder in placeholders:
        # Check all methods now, not when the sampler first draws one of them.
        if placeholder.location == f"{recipe_name}: merge_method":
            for method in settings.parameters[placeholder.name].choices:
                fit_to_method({"merge_method": method}, f"sweep.parameters.{placeholder.name}.choices")
    sums = tuple(group for names in settings.sum_to_one for group in _sums(names, settings, coordinates))
    return Space(recipe, tuple(coordinates), sums, layers or 0, recipe_name)


def project_to_sum_one(values: Sequence[float], bounds: Sequence[tuple[float, float]]) -> list[float]:
    """Return the values within ``bounds`` that are nearest to ``values`` and sum to one, rounded to four digits.

    The lower bounds must sum to at most one, and the upper bounds to at least one. All values are shifted by the same
    amount and clipped to their bounds (Euclidean projection on a bounded simplex; Held, Wolfe & Crowder 1974, Math.
    Program. 6:62).
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


def _require_parameter(placeholder: Placeholder, settings: SweepSettings) -> None:
    if placeholder.name not in settings.parameters:
        raise InvalidInput(
            placeholder.location,
            found=f"the placeholder ${placeholder.name}, which is not defined in sweep.parameters",
            expected="the name of a parameter",
            remedy=suggest(placeholder.name, settings.parameters),
        )


def _check_parameter(free: FreeParameter, location: str) -> None:
    if free.type == "category":
        if free.low is not None or free.high is not None:
            raise InvalidInput(location, found="low or high for a category", expected="choices under 'choices'")
        if not free.choices:
            raise InvalidInput(f"{location}.choices", found="no choices", expected="the choices of the category")
        # Compare texts, because 1 and True are equal in Python.
        texts = {_value_text(choice) for choice in free.choices}
        if len(texts) < len(free.choices):
            raise InvalidInput(f"{location}.choices", found=f"{list(free.choices)}", expected="each choice only once")
        if _value_text(free.start) not in texts:
            raise InvalidInput(
                f"{location}.start",
                found=repr(free.start),
                expected="one of the choices",
                remedy=suggest(str(free.start), [str(choice) for choice in free.choices]),
            )
    else:
        if free.choices:
            raise InvalidInput(
                f"{location}.choices",
                found=f"choices for the type {free.type}",
                expected="low and high, or type: category",
            )
        low, high, start = free.low, free.high, free.start
        if low is None or high is None:
            missing = "low" if low is None else "high"
            raise InvalidInput(f"{location}.{missing}", found="nothing", expected=f"a bound for the type {free.type}")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InvalidInput(location, found=f"low {low:g} and high {high:g}", expected="low less than high")
        if free.type == "log" and low <= 0:
            raise InvalidInput(f"{location}.low", found=f"{low:g}", expected="a number above 0 for the type log")
        if isinstance(start, (str, bool)):
            raise InvalidInput(f"{location}.start", found=repr(start), expected="a number")
        if free.type == "integer" and not all(float(x).is_integer() for x in (low, high, start)):
            raise InvalidInput(location, found=f"low {low:g}, high {high:g}, start {start:g}", expected="whole numbers")
        if not low <= start <= high:
            raise InvalidInput(f"{location}.start", found=f"{start:g}", expected=f"a number from {low:g} to {high:g}")
    if free.layers and free.type not in ("float", "log"):
        raise InvalidInput(
            f"{location}.layers",
            found=f"groups of layers for the type {free.type}",
            expected="type float or log, because values between two layers are interpolated",
            remedy="use filters",
        )
    if len(set(free.filters)) < len(free.filters) or {_OTHERS, ""} & set(free.filters):
        raise InvalidInput(
            f"{location}.filters",
            found=", ".join(map(repr, free.filters)),
            expected="different parts of tensor names. All other tensors have a value of their own",
        )


def _sums(names: Sequence[str], settings: SweepSettings, coordinates: Sequence[Coordinate]) -> list[tuple[int, ...]]:
    """Return the groups of coordinates that sum to one: one for each combination of filter and group of layers."""
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
        raise InvalidInput(location, found=f"one of {joined} in two groups", expected="each parameter in one group")
    if len({(free.layers, free.filters) for free in frees}) > 1:
        raise InvalidInput(location, found=joined, expected="the same layers and filters for all of them")
    lowest, highest, start = (sum(float(getattr(free, end)) for free in frees) for end in ("low", "high", "start"))
    if not lowest <= 1 <= highest:
        raise InvalidInput(
            location,
            found=f"the sum of {joined} is between {lowest:g} and {highest:g}",
            expected="a range that includes 1",
        )
    if abs(start - 1) > 1e-6:
        raise InvalidInput(location, found=f"the start values of {joined} sum to {start:g}", expected="1")
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


def _value_text(value: Value) -> str:
    return repr(value) if isinstance(value, (str, bool)) else repr(float(value))

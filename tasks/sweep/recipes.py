"""Handle the recipes of a sweep: find and fill placeholders, list the ingredients of a soup, and rewrite paths.

A placeholder such as ``$weight`` stands for a complete value, never for a part of a text. The value can be a number, a
method or the name of a model. It is a list if the parameter has a value for each group of layers or for each filter
(``parameters: {weight: $weight}``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import LINEAR
from mergegate.merge_core.recipe import parse_reference

_PLACEHOLDER = re.compile(r"\$([A-Za-z_]\w*)")
_PARAMETERS = "parameters"
_PATH_KEYS = ("model", "base_model", "source_model", "tokenizer_source", "source", "path")


class Placeholder(NamedTuple):
    """Placeholder and its position in a recipe.

    Args:
        name: Name without the dollar sign.
        location: Readable position in the recipe, such as ``models[0].parameters.weight``.
        takes_filters: Whether the value may be a list with an entry for each filter.
        takes_layers: Whether the value may be a list with an entry for each layer.
    """

    name: str
    location: str
    takes_filters: bool
    takes_layers: bool


@dataclass(frozen=True)
class SoupRecipe:
    """Recipe whose models are the ingredients of a soup. Create it with :func:`read_soup_recipe`.

    Args:
        document: Recipe as parsed YAML. Its method is ``linear``.
        names: Model of each ingredient, in the order of the recipe.
        is_uniform: Whether the recipe averages its models with equal weights.
    """

    document: Mapping[str, Any]
    names: tuple[str, ...]
    is_uniform: bool

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

    Args:
        recipe: Recipe as parsed YAML. A training run is already replaced with its checkpoints.
        location: Name of the recipe in error messages.

    Raises:
        InvalidInput: The recipe has another method, fewer than two models, the same model twice, or a placeholder.
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
    """Yield the placeholders in a recipe or a part of it, in order.

    Args:
        node: Recipe as parsed YAML, or a part of it.
        recipe_name: Name of the recipe in error messages.
        path: Keys and indices that lead to ``node``.

    Raises:
        InvalidInput: A text starts with a dollar sign but is not a placeholder, or a placeholder is used as a key.
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

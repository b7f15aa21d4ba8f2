"""Handle the recipes of a sweep: find and fill placeholders, and rewrite relative paths.

A placeholder such as ``$weight`` stands for a complete value, never for a part of a text. The value can be a number, a
method or the name of a model. It is a list if the parameter has a value for each group of layers or for each filter
(``parameters: {weight: $weight}``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput

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

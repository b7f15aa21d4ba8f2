"""Find and fill placeholders in a recipe: YAML in which some values are names such as ``$weight``.

A placeholder replaces a complete value, never part of a text. It can replace any value, such as a number, a method or
the name of a model. If a parameter has a value for each group of layers or for each filter, the placeholder is in the
position of the whole list (``parameters: {weight: $weight}``), because a list replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput

_HOLE = re.compile(r"\$([A-Za-z_]\w*)")
_PARAMETERS = "parameters"


class Placeholder(NamedTuple):
    """A placeholder and its position.

    Args:
        name: Name without the dollar sign.
        where: Readable position in the recipe, such as ``models[0].parameters.weight``.
        takes_filters: Whether a list of values by filter is allowed at this position.
        takes_layers: Whether a list of values along the layers is allowed at this position.
    """

    name: str
    where: str
    takes_filters: bool
    takes_layers: bool


def holes_in(recipe: Mapping[str, Any], where: str) -> tuple[Placeholder, ...]:
    """Return all placeholders, in the order of the recipe.

    Args:
        where: Name of the recipe in error messages.

    Raises:
        InvalidInput: A text starts with a dollar sign but is not a placeholder, or a placeholder is used as a key.
    """
    return tuple(_find_placeholders(recipe, (), where))


def fill(recipe: Mapping[str, Any], value_of: Callable[[str], Any]) -> dict[str, Any]:
    """Return a deep copy of ``recipe`` in which ``value_of(name)`` replaces each placeholder."""

    def replace(node: Any) -> Any:
        if isinstance(node, str) and (match := _HOLE.fullmatch(node)):
            return value_of(match[1])
        if isinstance(node, Mapping):
            return {key: replace(value) for key, value in node.items()}
        return [replace(item) for item in node] if isinstance(node, (list, tuple)) else node

    return {key: replace(value) for key, value in recipe.items()}


def _find_placeholders(node: Any, path: tuple[str | int, ...], recipe_name: str) -> Iterator[Placeholder]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if isinstance(key, str) and key.startswith("$"):
                raise InvalidInput(
                    _location(recipe_name, (*path, key)), found=f"the key {key!r}", expected="holes in values only"
                )
            yield from _find_placeholders(value, (*path, str(key)), recipe_name)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _find_placeholders(value, (*path, index), recipe_name)
    elif isinstance(node, str) and node.startswith("$"):
        match = _HOLE.fullmatch(node)
        if not match:
            raise InvalidInput(
                _location(recipe_name, path),
                found=repr(node),
                expected="a hole is a whole value: $ and a name of letters, digits and underscores",
            )
        is_parameter = path[-2:-1] == (_PARAMETERS,)
        # The entry ``{value: $weight, filter: mlp}`` in a list of such entries.
        is_filter_value = path[-1:] == ("value",) and _PARAMETERS in path[-4:-2]
        yield Placeholder(
            match[1],
            _location(recipe_name, path),
            takes_filters=is_parameter,
            takes_layers=is_parameter or is_filter_value,
        )


def _location(recipe_name: str, path: tuple[str | int, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"{recipe_name}: {text.removeprefix('.')}"

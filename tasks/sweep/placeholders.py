"""A recipe with holes: ordinary YAML in which some values are names, ``$weight``, to be filled in.

A hole is a whole value, never a part of a text, and may stand wherever a value stands: a number, a method, the name of
a model. Where a parameter has a value for each group of layers or for each filter, the hole stands where a person
would write the list (``parameters: {weight: $weight}``), because a list is what it becomes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput

_HOLE = re.compile(r"\$([A-Za-z_]\w*)")
_PARAMETERS = "parameters"


class Placeholder(NamedTuple):
    """One of them.

    Args:
        name: Without the dollar.
        where: Its place, as a person would say it: ``models[0].parameters.weight``.
        takes_filters: A list of values by filter may stand there.
        takes_layers: A list of values along the layers may stand there.
    """

    name: str
    where: str
    takes_filters: bool
    takes_layers: bool


def holes_in(recipe: Mapping[str, Any], where: str) -> tuple[Placeholder, ...]:
    """All holes, in the order in which they stand in the recipe.

    Args:
        where: What messages call the recipe.

    Raises:
        InvalidInput: A dollar at the beginning of a text that is no hole, or a hole in place of a key.
    """
    return tuple(_look(recipe, (), where))


def fill(recipe: Mapping[str, Any], value_of: Callable[[str], Any]) -> dict[str, Any]:
    """``recipe`` with every hole replaced by ``value_of`` of its name; nothing of it is shared with ``recipe``."""

    def filled(node: Any) -> Any:
        if isinstance(node, str) and (found := _HOLE.fullmatch(node)):
            return value_of(found[1])
        if isinstance(node, Mapping):
            return {key: filled(value) for key, value in node.items()}
        return [filled(item) for item in node] if isinstance(node, (list, tuple)) else node

    return {key: filled(value) for key, value in recipe.items()}


def _look(node: Any, path: tuple[str | int, ...], where: str) -> Iterator[Placeholder]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if isinstance(key, str) and key.startswith("$"):
                raise InvalidInput(
                    _place(where, (*path, key)), found=f"the key {key!r}", expected="holes in values only"
                )
            yield from _look(value, (*path, str(key)), where)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _look(value, (*path, index), where)
    elif isinstance(node, str) and node.startswith("$"):
        found = _HOLE.fullmatch(node)
        if not found:
            raise InvalidInput(
                _place(where, path),
                found=repr(node),
                expected="a hole is a whole value: $ and a name of letters, digits and underscores",
            )
        whole = path[-2:-1] == (_PARAMETERS,)
        # Of ``{value: $weight, filter: mlp}``, which stands in a list of such.
        of_filter = path[-1:] == ("value",) and _PARAMETERS in path[-4:-2]
        yield Placeholder(found[1], _place(where, path), takes_filters=whole, takes_layers=whole or of_filter)


def _place(where: str, path: tuple[str | int, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"{where}: {text.removeprefix('.')}"

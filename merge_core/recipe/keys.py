"""Mappings of a recipe: no key that nobody knows, said in one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from merge_core.errors import InvalidInput, suggest

_READABLE = 60  # characters of what was found


def known_mapping(
    value: object, where: str, known: Sequence[str], *, separator: str = ".", may_be_a_parameter: bool = False
) -> Mapping[str, Any]:
    """``value``, a mapping with at least one key, all of them ``known``.

    Args:
        where: What messages call it; ``separator`` comes between that and a key.
        may_be_a_parameter: A key that is nothing like the known ones probably belongs under ``parameters``.

    Raises:
        InvalidInput: naming the first key that is not known, with a suggestion.
    """
    content = plain_mapping(value, where)
    for key in content:
        if key not in known:
            name = str(key)[:_READABLE]
            remedy = suggest(name, known)
            if may_be_a_parameter and remedy.startswith("known"):
                remedy = f"if {name!r} is a parameter of the method, it belongs under 'parameters'; otherwise remove it"
            raise InvalidInput(
                f"{where}{separator}{name}",
                found=f"unknown key {name!r}",
                expected=f"one of {', '.join(known)}",
                remedy=remedy,
            )
    return content


def plain_mapping(value: object, where: str) -> Mapping[str, Any]:
    """``value``, a mapping with at least one key.

    Raises:
        InvalidInput: for anything else.
    """
    if not isinstance(value, Mapping) or not value:
        raise InvalidInput(where, found=f"{value!r:.{_READABLE}}", expected="a mapping")
    return value

"""Read the mappings of a recipe. Unknown keys cause warnings, and a key without a value counts as absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mergegate.merge_core.errors import FindingLog, InvalidInput, suggest
from mergegate.merge_core.methods import Method

_READABLE = 60  # characters of a quoted value
RECIPE_KEYS = (
    "merge_method",
    "models",
    "slices",
    "modules",
    "base_model",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "tokenizer",
    "chat_template",
    "name",
    "align_experts",
    "output",
    "rank",
    "statistics",
    "leave_out_beyond",
)


def known_mapping(
    value: object,
    location: str,
    known: Sequence[str],
    log: FindingLog | None = None,
    *,
    separator: str = ".",
    method: Method | None = None,
    required: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the entries of a mapping that have a known key and a value.

    mergekit reads a key without a value (null) as absent and ignores unknown keys. mergegate does the same, but warns
    about unknown keys.

    Args:
        value: The mapping.
        location: Location of the mapping for messages.
        known: Keys that are read.
        log: Receives a warning per unknown key. Default: refuse unknown keys, for mappings that mergekit does not have.
        separator: Text between ``location`` and a key in messages.
        method: Method whose parameters an unknown key probably refers to. Default: none.
        required: Keys that may be absent, but not null.

    Raises:
        InvalidInput: ``value`` is not a mapping, a ``required`` key is null, or a key is unknown and there is no log.
    """
    content = plain_mapping(value, location)
    for key in content:
        if key in known:
            if content[key] is None and key in required:
                raise InvalidInput(
                    f"{location}{separator}{key}", found="no value", expected="a value", remedy="remove the key"
                )
            continue
        name = str(key)[:_READABLE]
        place, found, expected = f"{location}{separator}{name}", f"unknown key {name!r}", f"one of {', '.join(known)}"
        if log is None:
            raise InvalidInput(place, found=found, expected=expected, remedy=suggest(name, known))
        remedy = _remedy(name, content, known, method)
        log.warn(
            place,
            found=f"{found}, which mergegate ignores, as mergekit does",
            expected=expected if remedy == "remove it" else "",
            remedy=remedy,
        )
    return {key: inner for key, inner in content.items() if key in known and inner is not None}


def _remedy(key: str, content: Mapping[str, Any], known: Sequence[str], method: Method | None) -> str:
    parameters = {parameter.name: parameter for parameter in method.parameters} if method else {}
    if key in parameters and "parameters" in known:
        if isinstance(content.get("parameters"), Mapping) and key in content["parameters"]:
            return "remove it: 'parameters' sets it, too"
        is_elsewhere = "model" in known and parameters[key].scope == "shared"
        return f"move it under {'the top-level ' if is_elsewhere else ''}'parameters'"
    if key == "revision" and isinstance(content.get("model"), str) and "@" not in content["model"]:
        return f"write 'model: {content['model']}@{content[key]}'"
    if key == "experts" and "models" in known:
        return "remove it, or remove the models: experts alone make a mixture"
    if near := get_close_matches(key, known, n=1, cutoff=0.6):
        return f"did you mean {near[0]!r}?"
    if near := get_close_matches(key, parameters, n=1, cutoff=0.6):
        return f"did you mean {near[0]!r}? It belongs under 'parameters'"
    if key in RECIPE_KEYS:
        return "move it to the top level of the recipe"
    return "remove it"


def plain_mapping(value: object, location: str) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping with at least one key.

    Raises:
        InvalidInput: ``value`` is anything else.
    """
    if not isinstance(value, Mapping) or not value:
        raise InvalidInput(location, found=f"{value!r:.{_READABLE}}", expected="a mapping with at least one key")
    return value

"""Read the mappings in a recipe. Unknown keys cause warnings, and a key without a value counts as absent."""

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
    "drop_prediction_layers",
    "output",
    "rank",
    "statistics",
    "router_repair",
    "leave_out_beyond",
)


def known_mapping(
    value: object,
    location: str,
    known_keys: Sequence[str],
    log: FindingLog | None = None,
    *,
    separator: str = ".",
    method: Method | None = None,
) -> dict[str, Any]:
    """Return the entries of a mapping that have a known key and a value.

    Like mergekit, mergegate reads a key without a value (null) as absent and ignores unknown keys, but it warns about
    unknown keys.

    Args:
        value: The mapping.
        location: Location of the mapping for messages.
        known_keys: Keys that the mapping may have.
        log: Receives a warning for each unknown key. None refuses unknown keys, for mappings that mergekit lacks.
        separator: Text between ``location`` and a key in messages.
        method: Method whose parameters an unknown key may be meant for. Default: none.

    Raises:
        InvalidInput: ``value`` is not a mapping, or a key is unknown and there is no log.
    """
    content = plain_mapping(value, location)
    for key in content:
        if key in known_keys:
            continue
        name = str(key)[:_READABLE]
        key_location, found = f"{location}{separator}{name}", f"unknown key {name!r}"
        expected = f"one of {', '.join(known_keys)}"
        if log is None:
            raise InvalidInput(key_location, found=found, expected=expected, remedy=suggest(name, known_keys))
        remedy = _remedy(name, content, known_keys, method)
        log.warn(
            key_location,
            found=f"{found}, which mergegate ignores, as mergekit does",
            expected=expected if remedy == "remove it" else "",
            remedy=remedy,
        )
    return {key: inner for key, inner in content.items() if key in known_keys and inner is not None}


def require_value(content: Mapping[str, Any], key: str, location: str) -> None:
    """Raise InvalidInput if ``key`` is present but has no value."""
    if key in content and content[key] is None:
        raise InvalidInput(location, found="no value", expected="a value", remedy="remove the key, or add a value")


def _remedy(key: str, content: Mapping[str, Any], known_keys: Sequence[str], method: Method | None) -> str:
    parameters = {parameter.name: parameter for parameter in method.parameters} if method else {}
    if key in parameters and "parameters" in known_keys:
        if isinstance(content.get("parameters"), Mapping) and key in content["parameters"]:
            return "remove it, because 'parameters' also sets it"
        is_elsewhere = "model" in known_keys and parameters[key].scope == "shared"
        return f"move it under {'the top-level ' if is_elsewhere else ''}'parameters'"
    if key == "revision" and isinstance(content.get("model"), str) and "@" not in content["model"]:
        return f"write 'model: {content['model']}@{content[key]}'"
    if key == "experts" and "models" in known_keys:
        return "remove it, or remove the models: a mixture has only experts"
    if near := get_close_matches(key, known_keys, n=1, cutoff=0.6):
        return f"did you mean {near[0]!r}?"
    if near := get_close_matches(key, parameters, n=1, cutoff=0.6):
        return f"did you mean {near[0]!r}? It belongs under 'parameters'"
    if key in RECIPE_KEYS:
        return "move it to the top level of the recipe"
    return "remove it"


def plain_mapping(value: object, location: str) -> Mapping[str, Any]:
    """Return ``value``, or raise InvalidInput if it is not a mapping with at least one key."""
    if not isinstance(value, Mapping) or not value:
        raise InvalidInput(location, found=f"{value!r:.{_READABLE}}", expected="a mapping with at least one key")
    return value

"""Rephrase pydantic's error messages for users who write YAML and do not know Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_Context = Mapping[str, Any]
_LONGEST = 100  # Maximum length of a quoted value in characters.

# Descriptions of the patterns of settings. A pattern that is not listed is shown unchanged.
_PATTERNS: Mapping[str, str] = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "a name of letters, digits, '.', '_' and '-' that begins with a letter or digit",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$": "org/name",
    r"^[A-Za-z0-9][\w. -]*$": "a name of letters, digits, spaces, '.', '_' and '-'",
    r"^[A-Za-z][\w-]*$": "a name of letters, digits, '_' and '-' that begins with a letter",
    r"^https?://": "a URL that begins with http:// or https://",
    r"^https?://[^\s@]+$": "a URL that begins with http:// or https:// and contains no user name",
    r"^https?://[^/\s@]+/?$": "a URL such as https://host:port, without a path or user name",
}
_PREFIXES: Mapping[str, str] = {"^s3://": "s3://bucket/prefix"}

# Messages by pydantic's error type.
_MESSAGES: Mapping[str, Callable[[_Context], str]] = {
    "literal_error": lambda context: f"expected {context.get('expected')}",
    "enum": lambda context: f"expected {context.get('expected')}",
    "greater_than": lambda context: f"expected a number greater than {_number(context.get('gt'))}",
    "greater_than_equal": lambda context: f"expected {_number(context.get('ge'))} or more",
    "less_than": lambda context: f"expected a number less than {_number(context.get('lt'))}",
    "less_than_equal": lambda context: f"expected {_number(context.get('le'))} or less",
    "too_short": lambda context: f"expected {context.get('min_length')} or more entries",
    "too_long": lambda context: f"expected {context.get('max_length')} or fewer entries",
    "string_too_short": lambda context: f"expected {context.get('min_length')} or more characters",
    "string_too_long": lambda context: f"expected {context.get('max_length')} or fewer characters",
    "union_tag_invalid": lambda context: f"{context.get('tag')!r} is unknown; expected {context.get('expected_tags')}",
    "union_tag_not_found": lambda context: "expected a key that states the kind",
    "finite_number": lambda context: "expected a finite number",
}
_KINDS: Mapping[str, str] = {
    "string": "a text",
    "int": "a whole number",
    "float": "a number",
    "decimal": "a number",
    "bool": "true or false",
    "path": "a file name",
    "mapping": "a mapping",
    "dict": "a mapping",
    "model": "a mapping",
    "model_attributes": "a mapping",
    "dataclass": "a mapping",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozen_set": "a list",
    "none_required": "nothing",
}
_KIND_SUFFIXES = ("_type", "_parsing", "_from_float")


def expectation(fault: str, context: _Context, message: str) -> str:
    """Return a description of the value that pydantic expected for a setting.

    ``fault`` is pydantic's error type, such as ``greater_than_equal``, and ``context`` the error's context, such as
    ``{"ge": 0}``. For error types without a description, the result is pydantic's own ``message``.
    """
    if fault == "string_pattern_mismatch":
        pattern = str(context.get("pattern", ""))
        by_prefix = next((text for prefix, text in _PREFIXES.items() if pattern.startswith(prefix)), "")
        return f"expected {_PATTERNS.get(pattern) or by_prefix or f'text that matches {pattern}'}"
    if fault in _MESSAGES:
        return _MESSAGES[fault](context)
    for ending in _KIND_SUFFIXES:
        if fault.endswith(ending) and (kind := _KINDS.get(fault.removesuffix(ending))):
            return f"expected {kind}"
    if fault in _KINDS:
        return f"expected {_KINDS[fault]}"
    text = message.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def join_expectations(messages: Sequence[str]) -> str:
    """Join the messages about a value that may have several types: ``3: expected a file name or a mapping``."""
    first, *rest = dict.fromkeys(messages)
    head, separator, _ = first.partition("expected ")
    if not rest or not separator or not all(message.startswith(f"{head}expected ") for message in rest):
        return "; ".join((first, *rest))
    return " or ".join((first, *(message.removeprefix(f"{head}expected ") for message in rest)))


def format_value(value: object) -> str:
    """Format a value for an error message in the style of YAML, shortened to 100 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "nothing"
    if isinstance(value, list | tuple) and not value:
        return "an empty list"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def describe_kind(value: object) -> str:
    """Return the kind of plain data in words, such as ``a list`` or ``nothing``."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return "a number" if isinstance(value, int | float) else "a text" if isinstance(value, str) else "a value"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

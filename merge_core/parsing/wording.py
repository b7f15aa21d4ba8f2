"""What pydantic says of a setting, in words for people who write YAML and do not know Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_Context = Mapping[str, Any]
_LONGEST = 100  # characters of a value that is quoted

# Patterns that settings have, in words. One that is not here is said as it is.
_PATTERNS: Mapping[str, str] = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "a name of letters, digits, '.', '_' and '-', which begins with a letter or digit",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$": "org/name",
    r"^[A-Za-z0-9][\w. -]*$": "a name of letters, digits, blanks, '.', '_' and '-'",
    r"^[A-Za-z][\w-]*$": "a name of letters, digits, '_' and '-', which begins with a letter",
    r"^https?://": "an address that begins with http:// or https://",
    r"^https?://[^\s@]+$": "an address that begins with http:// or https://, without a user in it",
    r"^https?://[^/\s@]+/?$": "an address such as https://host:port, without path or user",
}
_BEGINNINGS: Mapping[str, str] = {"^s3://": "s3://bucket/prefix"}

# By pydantic's name of a fault.
_SAID: Mapping[str, Callable[[_Context], str]] = {
    "string_pattern_mismatch": lambda said: f"expected {_in_words(str(said.get('pattern', '')))}",
    "literal_error": lambda said: f"expected {said.get('expected')}",
    "enum": lambda said: f"expected {said.get('expected')}",
    "greater_than": lambda said: f"expected more than {_number(said.get('gt'))}",
    "greater_than_equal": lambda said: f"expected {_number(said.get('ge'))} or more",
    "less_than": lambda said: f"expected less than {_number(said.get('lt'))}",
    "less_than_equal": lambda said: f"expected {_number(said.get('le'))} or less",
    "too_short": lambda said: f"expected {said.get('min_length')} or more entries",
    "too_long": lambda said: f"expected {said.get('max_length')} or fewer entries",
    "string_too_short": lambda said: f"expected {said.get('min_length')} or more characters",
    "string_too_long": lambda said: f"expected {said.get('max_length')} or fewer characters",
    "union_tag_invalid": lambda said: f"{said.get('tag')!r} is unknown; expected {said.get('expected_tags')}",
    "union_tag_not_found": lambda said: "says not which kind it is",
    "finite_number": lambda said: "expected a finite number",
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
_OF_A_KIND = ("_type", "_parsing", "_from_float")


def expectation(fault: str, said: _Context, message: str) -> str:
    """What a setting should have been.

    Args:
        fault: pydantic's name of what is wrong with it: ``greater_than_equal``.
        said: What pydantic knows of it: ``{"ge": 0}``.
        message: pydantic's own words, which stand where there are none here.
    """
    if fault in _SAID:
        return _SAID[fault](said)
    for ending in _OF_A_KIND:
        if fault.endswith(ending) and (kind := _KINDS.get(fault.removesuffix(ending))):
            return f"expected {kind}"
    if fault in _KINDS:
        return f"expected {_KINDS[fault]}"
    text = message.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def join_expectations(messages: Sequence[str]) -> str:
    """What is wrong with a value that may be of several kinds: ``3: expected a file name or a mapping``."""
    first, *others = dict.fromkeys(messages)
    head, found, _ = first.partition("expected ")
    if not others or not found or not all(one.startswith(f"{head}expected ") for one in others):
        return "; ".join((first, *others))
    return " or ".join((first, *(one.removeprefix(f"{head}expected ") for one in others)))


def format_value(value: object) -> str:
    """A value for a message, as YAML would have it, and not too long."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "nothing"
    if isinstance(value, list | tuple) and not value:
        return "an empty list"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def describe_kind(value: object) -> str:
    """What plain data are: ``a list``, ``nothing``."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return "a number" if isinstance(value, int | float) else "a text" if isinstance(value, str) else "a value"


def _in_words(pattern: str) -> str:
    begun = (words for beginning, words in _BEGINNINGS.items() if pattern.startswith(beginning))
    return _PATTERNS.get(pattern) or next(begun, f"what fits {pattern}")


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""Support settings in YAML, which pydantic reads: extensible classes, overrides for one run, and clear messages.

:func:`collect_settings` and :class:`SelectedBy` select one of several classes by a field that names it. Publishing
targets and variant formats use this: ``publish: {to: directory}`` selects the class with the field
``to: Literal["directory"]``, and other packages can add classes. :func:`with_overrides` changes settings of a profile
for one run, such as ``evaluate.documents=200`` from ``mergegate run --set``. :func:`expectation` rephrases pydantic's
messages for users who write YAML and do not know Python.
"""

from __future__ import annotations

import functools
import operator
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing.yaml_text import parse_yaml

_STEP = re.compile(r"\.?([A-Za-z_][\w-]*)|\[(\d+)\]")
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
# Messages by pydantic's error type, with the fields of its context.
_MESSAGES: Mapping[str, str] = {
    "literal_error": "expected {expected}",
    "enum": "expected {expected}",
    "greater_than": "expected a number greater than {gt}",
    "greater_than_equal": "expected {ge} or more",
    "less_than": "expected a number less than {lt}",
    "less_than_equal": "expected {le} or less",
    "too_short": "expected {min_length} or more entries",
    "too_long": "expected {max_length} or fewer entries",
    "string_too_short": "expected {min_length} or more characters",
    "string_too_long": "expected {max_length} or fewer characters",
    "union_tag_invalid": "{tag!r} is unknown; expected {expected_tags}",
    "union_tag_not_found": "expected a key that states the kind",
    "finite_number": "expected a finite number",
}
_KINDS: Mapping[str, str] = {
    "string": "a text",
    "int": "a whole number",
    **dict.fromkeys(("float", "decimal"), "a number"),
    "bool": "true or false",
    "path": "a file name",
    **dict.fromkeys(("mapping", "dict", "model", "model_attributes", "dataclass"), "a mapping"),
    **dict.fromkeys(("list", "tuple", "set", "frozen_set"), "a list"),
    "none_required": "nothing",
}
_KIND_SUFFIXES = ("_type", "_parsing", "_from_float")

T = TypeVar("T", bound=BaseModel)


def collect_settings(
    base: type, field: str, built_in: Sequence[type[T]], points: Iterable[EntryPoint], group: str
) -> Mapping[str, type[T]]:
    """Return the built-in classes and those of entry points, by the name in ``field``.

    Args:
        base: Class that all of them extend.
        field: Field of each class whose type is ``Literal["name"]``.
        built_in: Classes of mergegate.
        points: Entry points. The value of each is a class or a sequence of classes.
        group: Group of the entry points, for messages.

    Raises:
        InvalidInput: An installed package registers an object that is not such a class, or a name that is taken.
    """
    classes = {_name(each, base, field): each for each in built_in}
    for point in points:
        loaded = point.load()
        for each in (loaded,) if isinstance(loaded, type) else tuple(loaded):
            name = _name(each, base, field)
            if not name or name in classes:
                raise InvalidInput(
                    f"entry point {group}:{point.name}",
                    found=f"the name {name!r} is already in use" if name else f"{each!r}",
                    expected=f"a {base.__name__} with a field {field}: Literal['name'] and a name of its own",
                    remedy="uninstall the package that registers it",
                )
            classes[name] = each
    return MappingProxyType(classes)


def _name(candidate: object, base: type, field: str) -> str:
    """Return the name of a class, or an empty string if ``candidate`` does not extend ``base`` or has no name."""
    fields = getattr(candidate, "model_fields", {})
    if not (isinstance(candidate, type) and issubclass(candidate, base) and field in fields):
        return ""
    annotation = fields[field].annotation
    words = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
    return words[0] if len(words) == 1 and isinstance(words[0], str) else ""


@dataclass(frozen=True)
class SelectedBy:
    """Annotation of a setting that accepts any of several classes: ``Annotated[Base, SelectedBy("to", classes)]``.

    The union is resolved when a schema is built, because other packages may add classes.

    Args:
        field: Field that names the class.
        classes: Returns the classes by name.
        default: Name of the class if the field is missing.
    """

    field: str
    classes: Callable[[], Mapping[str, type[BaseModel]]]
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        def select(value: object) -> str | None:
            if isinstance(value, Mapping):
                name = value.get(self.field, self.default)
            else:
                name = getattr(value, self.field, None)
            return name if isinstance(name, str) else None

        tagged: list[Any] = [Annotated[each, Tag(name)] for name, each in self.classes().items()]
        return handler.generate_schema(Annotated[functools.reduce(operator.or_, tagged), Discriminator(select)])


def with_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a profile's data with overrides applied in order.

    Each override is ``KEY=VALUE``. The key is a path (``evaluate.tasks[0].max_drop``), and the value is YAML (``200``,
    ``null``, ``{max_drop: 2}``). Validating the profile later checks that the key exists and the value is valid.

    Raises:
        InvalidInput: An override has another form, or its path leads through a value that is not a section or list.
    """
    result = deepcopy(dict(data))
    for text in overrides:
        path, is_set, value = text.partition("=")
        steps = _steps(path.strip())
        if not is_set or not steps or isinstance(steps[0], int):
            raise InvalidInput(
                "--set", found=f"{text!r}", expected="KEY=VALUE", remedy="for example --set evaluate.documents=200"
            )
        documents = parse_yaml(value, f"--set {text}", "a value in YAML") or [None]
        if len(documents) > 1:
            raise InvalidInput(f"--set {text}", found=f"{len(documents)} documents", expected="one value")
        parent: Any = result
        for index, step in enumerate(steps):
            if isinstance(step, int):
                if not isinstance(parent, list) or step >= len(parent):
                    raise _invalid_path(steps[:index], parent, text, f"a list with more than {step} items")
            elif not isinstance(parent, dict):
                raise _invalid_path(steps[:index], parent, text, "a section")
            if index == len(steps) - 1:
                parent[step] = documents[0]
            elif isinstance(step, str) and parent.get(step) is None:
                parent[step] = {}
            parent = parent[step]
    return result


def _steps(path: str) -> list[str | int]:
    """Split ``a.b[0]`` into ``['a', 'b', 0]``. The result is empty if ``path`` is not valid."""
    matches = list(_STEP.finditer(path))
    if "".join(match.group() for match in matches) != path or path.startswith("."):
        return []
    return [match.group(1) or int(match.group(2)) for match in matches]


def _invalid_path(steps: Sequence[str | int], value: object, text: str, expected: str) -> InvalidInput:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
    return InvalidInput(f"--set {text}", found=f"{path or 'the profile'} is {value!r}", expected=expected)


def expectation(fault: str, context: Mapping[str, Any], message: str) -> str:
    """Return a description of the value that pydantic expected for a setting.

    ``fault`` is pydantic's error type, such as ``greater_than_equal``, and ``context`` the error's context, such as
    ``{"ge": 0}``. For error types without a description, the result is pydantic's own ``message``.
    """
    if fault == "string_pattern_mismatch":
        pattern = str(context.get("pattern", ""))
        by_prefix = next((text for prefix, text in _PREFIXES.items() if pattern.startswith(prefix)), "")
        return f"expected {_PATTERNS.get(pattern) or by_prefix or f'text that matches {pattern}'}"
    if fault in _MESSAGES:
        numbers = {name: f"{value:g}" for name, value in context.items() if isinstance(value, float)}
        return _MESSAGES[fault].format_map({**context, **numbers})
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

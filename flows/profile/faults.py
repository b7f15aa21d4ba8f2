"""Parse settings, and explain all their faults together, each with its location and a suggestion."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import expectation, format_value, join_expectations
from mergegate.tasks.quality.evaluation import BuiltInTask, built_in_tasks
from mergegate.tasks.quality.gate import Guard
from mergegate.tasks.quality.variants import VariantFormat, variant_formats
from mergegate.tasks.release.publish.targets import PublishTarget, publish_targets

_UNION_TAG = re.compile(r".*\[.*|(function|constrained|lax-or-strict|is-instance)-.*", re.DOTALL)
_VALUE_TAG = re.compile(
    rf"{_UNION_TAG.pattern}|int|float|str|bool", re.DOTALL
)  # below a key without settings of its own

Settings = TypeVar("Settings", bound=BaseModel)


def parse_settings(model: type[Settings], data: Mapping[str, object], location: str) -> Settings:
    """Parse settings from plain data. ``location`` is the name of the data in messages.

    Raises:
        InvalidInput: The data is invalid. The error lists all faults.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise settings_faults(error, location, model) from None


def settings_faults(error: ValidationError, file: str, model: type[BaseModel]) -> InvalidInput:
    """Convert a pydantic error about the settings in ``file`` into one readable error with all faults.

    ``model`` is the class of the settings. For an unknown key, the error suggests a similar key of this class.
    """
    locations = [fault["loc"] for fault in error.errors()]
    # pydantic also reports a list with one invalid item as "too short". If a section and a key inside it both have
    # faults, only the fault of the key is informative.
    inside = {location[:depth] for location in locations for depth in range(len(location))}
    # A value that may be a file or a mapping produces two faults at one location.
    alternatives: dict[str, list[tuple[str, str]]] = {}
    for fault in error.errors():
        if fault["loc"] not in inside:
            location, message, remedy = _describe_fault(fault, model)
            alternatives.setdefault(location, []).append((message, remedy))
    faults = [
        (location, join_expectations([message for message, _ in choices]), choices[0][1])
        for location, choices in alternatives.items()
    ]
    if len(faults) == 1:
        (location, found, remedy) = faults[0]
        return InvalidInput(f"{file}: {location}" if location else file, found=found, remedy=remedy)
    lines = "".join(
        f"\n  {location}: {found}" + (f"; {remedy}" if remedy else "") for location, found, remedy in faults
    )
    return InvalidInput(file, found=f"{len(faults)} problems{lines}")


def _describe_fault(fault: Any, model: type[BaseModel]) -> tuple[str, str, str]:
    """Return the location of a fault, the problem and the fix, in words for users instead of programmers."""
    # Format ('evaluate', 'tasks', 0, 'max_drop') as evaluate.tasks[0].max_drop, and walk the types to the section.
    location, section, is_inside = "", model, True
    *parents, last = fault["loc"] or ("",)
    for depth, part in enumerate(fault["loc"]):
        # pydantic's tag for the kind of target, the format of a variant, or the kind of built-in task
        if part in (kinds := _kinds_of(section)):
            section = kinds[part]
            continue
        if part == "built_in" and section is Guard:
            section, part = BuiltInTask, "task"  # where the user writes the settings of a built-in task
            location += f".{part}"
            continue
        # pydantic's tag for a member of a union, which the user did not write
        is_tag = isinstance(part, str) and bool(_UNION_TAG.fullmatch(part) if is_inside else _VALUE_TAG.fullmatch(part))
        if not is_tag:
            is_plain = isinstance(part, str) and re.fullmatch(r"[\w-]+", part)  # others: indices, ../models/base
            location = f"{location}{f'.{part}' if is_plain else f'[{part!r}]'}" if location else str(part)
        if isinstance(part, str) and is_inside and depth < len(parents):
            field = section.model_fields.get(part)
            inner = _settings_in(field.annotation) if field else None
            section, is_inside = inner or section, inner is not None
    if fault["type"] == "extra_forbidden":
        keys = [name for name in section.model_fields if name not in ("root", "overrides", "built_in")]
        return location, f"unknown key {last!r}", suggest(str(last), keys)
    if fault["type"] == "missing":
        return location, "is missing", "add it"
    if section is BuiltInTask and fault["type"].startswith("union_tag"):
        tag, kinds_of_tasks = (fault.get("ctx") or {}).get("tag"), list(built_in_tasks())
        if tag is None:
            return location, "has no kind", f"add kind: {' or '.join(kinds_of_tasks)}"
        return location, f"unknown kind {tag!r}", suggest(str(tag), kinds_of_tasks)
    message = expectation(fault["type"], fault.get("ctx") or {}, str(fault["msg"]))
    # The location is enough for a whole section, and some messages already show the input.
    shows_input = isinstance(fault["input"], Mapping | BaseModel) or repr(fault["input"]) in message
    return location, message if shows_input else f"{format_value(fault['input'])}: {message}", ""


def _kinds_of(section: type[BaseModel]) -> Mapping[str, type[BaseModel]]:
    """Return the classes that a field of the section's type can have, by pydantic's tag. Empty if it is one class."""
    if section is BuiltInTask:
        return built_in_tasks()
    return publish_targets() if section is PublishTarget else variant_formats() if section is VariantFormat else {}


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class inside an annotation such as ``X``, ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((inner for part in typing.get_args(annotation) if (inner := _settings_in(part))), None)

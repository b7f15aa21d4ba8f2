"""Explain the faults of a settings file: all of them together, each with its location and a suggestion."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import expectation, format_value, join_expectations
from mergegate.tasks.publish.targets import publish_targets


def settings_faults(error: ValidationError, file: str, model: type[BaseModel]) -> InvalidInput:
    """Convert a pydantic error about a settings file into one readable error with all faults.

    Args:
        error: Error that pydantic raised.
        file: Name of the file in messages.
        model: Settings model. Its keys are suggested for unknown ones.
    """
    locations = [fault["loc"] for fault in error.errors()]
    # pydantic also reports a list with one invalid item as "too short". If a location and one inside it both have
    # faults, only the inner one is informative.
    inside = {location[:depth] for location in locations for depth in range(len(location))}
    messages = [
        (_format_location(fault["loc"]), *_fault(fault, model))
        for fault in error.errors()
        if fault["loc"] not in inside
    ]
    # A value that may be a file or a mapping produces two faults at one location.
    alternatives: dict[str, list[tuple[str, str]]] = {}
    for location, message, remedy in messages:
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
    return InvalidInput(file, found=f"{len(faults)} faults{lines}")


def _fault(fault: Any, model: type[BaseModel]) -> tuple[str, str]:
    """Return the problem and its fix. Replace pydantic's wording where it addresses programmers."""
    *parents, last = fault["loc"] or ("",)
    if fault["type"] == "extra_forbidden":
        section = _section_at(model, parents)
        if new_name := getattr(section, "renamed_keys", {}).get(last):
            return f"the key {last!r} was renamed", f"write {new_name!r}"
        keys = [name for name in section.model_fields if name not in ("root", "overrides")]
        return f"unknown key {last!r}", suggest(str(last), keys)
    if fault["type"] == "missing":
        return "is missing", "add it"
    message = expectation(fault["type"], fault.get("ctx") or {}, str(fault["msg"]))
    # The location is enough for a whole section, and some messages already show the input.
    shows_input = isinstance(fault["input"], Mapping | BaseModel) or repr(fault["input"]) in message
    return message if shows_input else f"{format_value(fault['input'])}: {message}", ""


def _format_location(location: tuple[int | str, ...]) -> str:
    """Format ``('evaluate', 'tasks', 0, 'max_drop')`` as ``evaluate.tasks[0].max_drop``."""
    text = ""
    for previous, part in zip((None, *location), location, strict=False):
        if previous == "publish" and part in publish_targets():  # pydantic's tag for the kind of target
            continue
        # pydantic's tag for a member of a union
        if isinstance(part, str) and ("[" in part or part.startswith("function-")):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _section_at(model: type[BaseModel], location: list[int | str]) -> type[BaseModel]:
    """Return the settings class at ``location``, by walking the types."""
    for previous, part in zip((None, *location), location, strict=False):
        if isinstance(part, int):
            continue
        if previous == "publish" and part in publish_targets():
            model = publish_targets()[part]
            continue
        field = model.model_fields.get(part)
        inner = _settings_in(field.annotation) if field else None
        if inner is None:
            break
        model = inner
    return model


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class inside ``X``, ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((inner for part in typing.get_args(annotation) if (inner := _settings_in(part))), None)

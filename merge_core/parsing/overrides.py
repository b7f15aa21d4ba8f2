"""What is said beside a profile for one run: ``evaluate.documents=200``, as ``mergegate run --set`` takes it.

The file stays as it is. What was said otherwise is part of the profile from then on, and of what is kept of the run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing.yaml_text import parse_yaml

_STEP = re.compile(r"\.?([A-Za-z_][\w-]*)|\[(\d+)\]")


def with_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``data`` of a profile with the values of ``KEY=VALUE``, in their order; the profile itself is not changed.

    A key is a path (``evaluate.tasks[0].max_drop``), a value is YAML (``200``, ``null``, ``{max_drop: 2}``). Whether
    there is such a key, and whether it can have such a value, is found out with all else that the profile says.

    Raises:
        InvalidInput: for what is no ``KEY=VALUE``, and a path that leads through a value that holds nothing.
    """
    changed = deepcopy(dict(data))
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
        _put(changed, steps, documents[0], text)
    return changed


def _steps(path: str) -> list[str | int]:
    """``a.b[0]`` as ``['a', 'b', 0]``; empty for what is no path."""
    found = list(_STEP.finditer(path))
    if "".join(step.group() for step in found) != path or path.startswith("."):
        return []
    return [step.group(1) or int(step.group(2)) for step in found]


def _put(data: dict[str, Any], steps: Sequence[str | int], value: object, text: str) -> None:
    place: Any = data
    for at, step in enumerate(steps):
        is_last = at == len(steps) - 1
        if isinstance(step, int):
            if not isinstance(place, list) or step >= len(place):
                raise _leads_nowhere(steps[:at], place, text, f"a list of more than {step} items")
        elif not isinstance(place, dict):
            raise _leads_nowhere(steps[:at], place, text, "a section")
        if is_last:
            place[step] = value
        elif isinstance(step, str) and place.get(step) is None:
            place[step] = {}
        place = place[step]


def _leads_nowhere(steps: Sequence[str | int], there: object, text: str, expected: str) -> InvalidInput:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
    return InvalidInput(f"--set {text}", found=f"{path or 'the profile'} is {there!r}", expected=f"{expected} there")

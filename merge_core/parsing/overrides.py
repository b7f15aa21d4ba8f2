"""Override profile settings for one run, such as ``evaluate.documents=200`` from ``mergegate run --set``.

The profile's file does not change. The overrides are part of the loaded profile and of the record of the run.
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

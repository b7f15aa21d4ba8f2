"""Print the ``--json`` object of a command: status, message, findings, then other keys.

::

    {"status": "refused", "message": "…", "findings": [{"severity": "block", "where": "…", …}], …}

docs/json.md describes it for users, docs/schema/answer.json for programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from mergegate.merge_core.errors import Finding


def print_answer(status: str, message: str, more: Mapping[str, Any], findings: Iterable[Finding] = ()) -> None:
    """Print the JSON object of a command.

    Args:
        status: One or two words: ``released``, ``refused``, ``sound``, ``listed``.
        message: Message for users.
        more: Other keys of this command. They cannot replace the first three.
        findings: Problems, worst first.
    """
    answer = {"status": status, "message": message, "findings": [asdict(finding) for finding in findings]}
    print(json.dumps({**answer, **{key: value for key, value in more.items() if key not in answer}}, default=str))


def answer_schema() -> dict[str, Any]:
    """Return the JSON Schema of the ``--json`` output of every command."""
    text = {"type": "string"}
    finding = {
        "type": "object",
        "required": ["severity", "where", "found"],
        "properties": {
            "severity": {"enum": ["block", "warn", "info"]},
            **dict.fromkeys(("where", "found", "expected", "remedy"), text),
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mergegate: what a command prints with --json",
        "type": "object",
        "required": ["status", "message", "findings"],
        "properties": {"status": text, "message": text, "findings": {"type": "array", "items": finding}},
    }

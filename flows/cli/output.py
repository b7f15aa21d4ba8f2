"""The one shape of every ``--json`` object: what came out, in a word and a sentence, what was found, then the rest.

::

    {"status": "refused", "message": "…", "findings": [{"severity": "block", "where": "…", …}], …}

docs/json.md describes it for people, docs/schema/answer.json for machines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from mergegate.merge_core.errors import Finding


def print_answer(status: str, message: str, more: Mapping[str, Any], findings: Iterable[Finding] = ()) -> None:
    """Print the one JSON object of a command.

    Args:
        status: In a word or two: ``released``, ``refused``, ``sound``, ``listed``.
        message: What a person would read.
        more: What this command says besides; it cannot change the first three.
        findings: What was found wrong or odd, worst first.
    """
    told = {"status": status, "message": message, "findings": [asdict(one) for one in findings]}
    print(json.dumps({**told, **{key: value for key, value in more.items() if key not in told}}, default=str))


def answer_schema() -> dict[str, Any]:
    """The JSON Schema of what every command prints with ``--json``."""
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

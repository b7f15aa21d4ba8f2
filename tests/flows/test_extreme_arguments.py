"""Every command, with extreme values of every argument and option: an exit code of the table, and no traceback."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer.main

from flows.cli.app import app

PATIENCE_S = 20
LARGEST = 2**70
MISSING_PARENT = "recipe: {merge_method: linear, models: [{model: nowhere, parameters: {weight: 1}}]}\n"
# Valid arguments of each command. One parameter after the other is replaced by extreme values.
ARGUMENTS: dict[str, list[str]] = {
    "run": ["missing-parent.yaml", "--dry-run"],
    "demo": ["copy-of-the-demo"],
    "sweep": ["missing-parent.yaml"],
    "tune": ["missing-parent.yaml"],
    "server": [],
    "worker": ["--once"],
    "deploy": [],
    "trigger": ["demo"],
    "approve": [],
    "merge": ["profiles/demo/recipes/linear.yaml", "out"],
    "check": ["missing-parent.yaml"],
    "fetch-data": ["missing-parent.yaml"],
    "extract-lora": ["profiles/demo/models/upper", "profiles/demo/models/base", "--rank", "1"],
    "init": ["profiles/demo/models/base", "profiles/demo/models/upper", "--out", "new", "--yes"],
    "schema": [],
    "plan": ["profiles/demo/recipes/linear.yaml"],
    "smoke": ["profiles/demo/models/nowhere"],
    "methods": [],
    "transplant-tokenizer": ["profiles/demo/models/upper", "profiles/demo/models/base", "out"],
    "compare": ["profiles/demo/models/nowhere", "profiles/demo/models/base", "--profile", "missing-parent.yaml"],
    "gate": ["merge=results", "reference=results", "--profile", "missing-parent.yaml"],
    "doctor": [],
    "history": [],
    "status": [],
    "open": [],
    "explain": ["1234"],
    "verify": ["nowhere"],
    "reproduce": ["nowhere"],
    "store ls": [],
    "store du": [],
    "store verify": [],
    "store gc": [],
    "shadow look": ["missing-parent.yaml"],
    "shadow promote": ["missing-parent.yaml", "--why", "because"],
    "shadow rollback": ["missing-parent.yaml", "--why", "because"],
    "shadow status": ["missing-parent.yaml"],
    "shadow serve": ["missing-parent.yaml"],
    "shadow replay": ["profiles/demo/traffic.jsonl", "--to", "http://127.0.0.1:9"],
}
TEXTS = ("", "x" * 100_000, "a\0b", "a\nb", "\udcff", "-x", "../..", "💥")
NUMBERS = ("-5", "0", str(LARGEST), str(-LARGEST), "")
FLOATS = ("nan", "inf", "-inf", "-1", "1e308", "")
PATHS = (
    "",
    ".",
    "/",
    "..",
    "pipe",
    "directory",
    "nowhere/at/all",
    "a\0b",
    "x" * 300,
    "\udcff",
    "-x",
    "a\nb",
    "/dev/null",
    "/dev/zero",
    "/proc/nowhere",
    "empty",
    "empty/below",
    "loop",
)


def commands() -> Iterator[tuple[str, Any]]:
    waiting = [("", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop(0)
        if below := getattr(command, "commands", None):
            waiting += [(f"{name} {each}".strip(), sub) for each, sub in below.items()]
        else:
            yield name, command


def extremes(annotation: Any) -> tuple[str, ...]:
    """Extreme values of a parameter of this type; a flag has none."""
    kinds = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        if typing.get_origin(kinds[0]) is list:
            return extremes(kinds[0])
    (kind,) = kinds
    if kind is bool:
        return ()
    if issubclass(kind, Path):
        return PATHS
    if issubclass(kind, int):
        return NUMBERS
    if issubclass(kind, float):
        return FLOATS
    assert issubclass(kind, (str, Enum)), kind
    return tuple(dict.fromkeys((*TEXTS, *PATHS))) if not issubclass(kind, Enum) else TEXTS


COMMANDS = dict(commands())
CASES = [
    (name, parameter.name, value)
    for name, command in COMMANDS.items()
    for parameter in command.params
    if parameter.name != "help"
    for value in extremes(parameter.type_descriptor.annotation)
]


def line_of(name: str, changed: str, value: str) -> list[str]:
    """The command line of ``name`` in which the parameter ``changed`` has the value."""
    command, words = COMMANDS[name], list(ARGUMENTS[name])
    parameter = next(one for one in command.params if one.name == changed)
    if parameter.param_type_name == "option":
        option = max(parameter.opts, key=len)
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
        return [
            *name.split(),
            f"{option}={value}" if option.startswith("--") else option,
            *([] if option.startswith("--") else [value]),
            *words,
        ]
    arguments = [one.name for one in command.params if one.param_type_name == "argument"]
    end = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    given, options = words[:end], words[end:]
    position = arguments.index(changed)
    given[position : position + 1] = [value]
    return [*name.split(), *options, "--", *given]

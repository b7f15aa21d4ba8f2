"""Every command survives extreme values of each argument and option: a documented exit code and no traceback."""

from __future__ import annotations

import os
import signal
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer.main
from demo_project import Project, expect, make_project

from mergegate.flows.cli.app import app
from mergegate.flows.cli.command import local_path
from mergegate.merge_core.errors import EXIT_CODES

PATIENCE_S = 30
PARENTLESS = "name: m\nrecipe: {merge_method: linear, models: [{model: nowhere, parameters: {weight: 1}}]}\n"
BASE, REVERSER = "profiles/demo/models/base", "profiles/demo/models/reverser"
RECIPE = "profiles/demo/recipes/linear.yaml"
# Valid arguments of each command. The tests replace one parameter at a time. Commands that would start Prefect's API
# for an existing profile get a missing one.
ARGUMENTS: dict[str, list[str]] = {
    "run": ["parentless.yaml", "--dry-run"], "demo": ["copy-of-the-demo"],
    **{name: ["missing.yaml"] for name in ("sweep", "tune", "shadow evaluate", "shadow status", "shadow serve")},
    **{
        name: [] for name in ("server", "deploy", "approve", "schema", "methods", "doctor", "history", "status", "open")
    },
    **{name: [] for name in ("store ls", "store du", "store verify", "store gc")}, "worker": ["--once"],
    "trigger": ["demo"], "merge": [RECIPE, "out"], "check": ["parentless.yaml"], "fetch-data": ["parentless.yaml"],
    "extract-lora": [REVERSER, BASE, "--rank", "1"], "init": [BASE, REVERSER, "--output", "new", "--yes"],
    "plan": [RECIPE, "--no-probe"], "smoke": ["profiles/demo/models/nowhere"],
    "transplant-tokenizer": [REVERSER, BASE, "out"],
    "compare": ["profiles/demo/models/nowhere", BASE, "--profile", "missing.yaml"],
    "gate": ["merge=results", "--profile", "parentless.yaml"], "explain": ["1234"], "verify": ["nowhere"],
    "export": ["nowhere", "--format", "inspect", "--output", "exported"],
    "fingerprint": [BASE, "--index", "known.jsonl"], "families": ["qwen3"], "reproduce": ["nowhere"],
    "shadow promote": ["missing.yaml", "--reason", "because"],
    "shadow rollback": ["missing.yaml", "--reason", "because"],
    "shadow replay": ["missing.jsonl", "--to", "http://127.0.0.1:9"],
}  # fmt: skip
PATHS = ["", ".", "/", "..", "pipe", "directory", "nowhere/at/all", "a\0b", "x" * 300, "\udcff", "-x", "a\nb"]
PATHS += ["/dev/null", "/dev/zero", "/proc/nowhere", "empty", "empty/below", "loop", "x/" * 3000]
TEXTS = ["x" * 100_000, "a\0b=1", "a=\0", "a\nb", "\udcff", "-x", "=", "💥", *PATHS]
INTEGERS = ["-5", "0", str(2**70), str(-(2**70)), ""]
NUMBERS = ["nan", "inf", "-inf", "-1", "1e308", ""]
QUICK = {"", ".", "pipe", "a\0b", "/dev/zero", "/", "\udcff", "a\0b=1", "-5", "nan", "inf", "-1"}
OFTEN = ("run", "merge", "check", "gate", "history", "trigger", "worker", "store gc", "shadow replay")
# These would succeed if the tests run as root.
WRITE_TO_THE_SYSTEM = {("init", "output", "/")}


def commands() -> Iterator[tuple[str, Any]]:
    waiting = [("", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop(0)
        if below := getattr(command, "commands", None):
            waiting += [(f"{name} {word}".strip(), sub) for word, sub in below.items()]
        else:
            yield name, command


COMMANDS = dict(commands())


def value_type(parameter: Any) -> type:
    """Return the declared type of one value of a parameter."""
    kind = parameter.type_descriptor.annotation
    while typing.get_origin(kind) is not None:
        assert typing.get_origin(kind) in (list, typing.Union, types.UnionType, typing.Literal)
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return kind if isinstance(kind, type) else type(kind)  # that of a literal value


def extreme_values(parameter: Any) -> list[str]:
    for kind, values in ((bool, []), (Enum, TEXTS), (Path, PATHS), (int, INTEGERS), (float, NUMBERS), (str, TEXTS)):
        if issubclass(value_type(parameter), kind):
            return values
    raise AssertionError(f"{parameter.name}: extreme values of {value_type(parameter)} are not known here")


def line_with(name: str, parameter: Any, value: str) -> list[str]:
    """Return the command line of ``name`` with the parameter set to the value."""
    words = list(ARGUMENTS[name])
    if parameter.param_type_name == "option":
        option = max(parameter.opts, key=len)
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
        return [*name.split(), option, value, *words]
    first_option = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    arguments, options = words[:first_option], words[first_option:]
    position = [one.name for one in COMMANDS[name].params if one.param_type_name == "argument"].index(parameter.name)
    arguments[position : position + 1] = [value]
    return [*name.split(), *options, "--", *arguments]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = make_project(tmp_path_factory.mktemp("above") / "project")
    (made.root / "parentless.yaml").write_text(PARENTLESS)
    os.mkfifo(made.root / "pipe")
    (made.root / "directory").mkdir()
    (made.root / "empty").touch()
    (made.root / "loop").symlink_to("loop")
    return made


class Hang(BaseException):
    """Raised if a command hangs. It derives from BaseException so that mergegate does not catch it."""


def hang(*_: object) -> None:
    raise Hang(f"{PATIENCE_S} s")


def require_known_ending(project: Project, line: list[str]) -> None:
    shown = [word[:60] for word in line]
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(PATIENCE_S)
    try:
        result = project.mergegate(*line)
    except BaseException as error:
        pytest.fail(f"{shown}: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert result.exit_code in set(EXIT_CODES.values()) - {1}, f"{shown}: {result.output}"
    assert "Traceback" not in result.output, result.output


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop servers, workers and the demo release right after their arguments are parsed.

    ``server`` and ``worker`` change the environment of their process, which later tests share. Restore it.
    """

    def end(*_: object, **__: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("mergegate.flows.cli.server.serve_prefect", end)
    monkeypatch.setattr("mergegate.flows.cli.server.os.execve", end)
    monkeypatch.setattr("mergegate.flows.cli.run.run_command", end)
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def test_every_command_has_valid_arguments_here() -> None:
    assert set(ARGUMENTS) == set(COMMANDS)


def rows() -> Iterator[Any]:
    """Yield each command with quick values, and then with all others."""
    for quick, tier in ((True, pytest.mark.story), (False, pytest.mark.proof)):
        for name in COMMANDS:
            # ``compare`` starts Prefect's API before it reads its arguments.
            marks = () if quick and name in OFTEN else pytest.mark.proof if name == "compare" else tier
            yield pytest.param(name, quick, marks=marks, id=name if quick else f"{name}: all others")


@pytest.mark.parametrize(("name", "quick"), list(rows()))
def test_extreme_arguments_end_in_an_exit_code(project: Project, name: str, quick: bool) -> None:
    for parameter in COMMANDS[name].params:
        for value in extreme_values(parameter):
            if (value in QUICK) == quick and (name, parameter.name, value) not in WRITE_TO_THE_SYSTEM:
                require_known_ending(project, line_with(name, parameter, value))


@pytest.mark.parametrize("value", ["-5", str(-(2**70)), "", "nan"])
def test_a_seed_is_a_whole_number_from_0(project: Project, value: str) -> None:
    expect(project.mergegate("merge", *ARGUMENTS["merge"], "--seed", value), 2, "--seed")


def test_every_path_on_the_command_line_has_the_one_parser() -> None:
    paths = [one for command in COMMANDS.values() for one in command.params if value_type(one) is Path]
    assert len(paths) > 20
    assert all(one.type_descriptor.parameter_info.parser is local_path for one in paths)

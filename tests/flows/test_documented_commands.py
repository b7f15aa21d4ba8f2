"""Commands and YAML in the README and docs/ are accepted by the product."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from typer.exceptions import TyperException

from mergegate.flows.cli.app import app
from mergegate.flows.prefect_api.schedules import Schedules, parse_schedules
from mergegate.flows.profile import Profile, parse_profile
from mergegate.merge_core.errors import InvalidInput

PROJECT = Path(__file__).resolve().parents[2]
PAGES = [page for pattern in ("*.md", "docs/**/*.md", "profiles/**/*.md") for page in sorted(PROJECT.glob(pattern))]
MERGEGATE = typer.main.get_command(app)


class Documented(NamedTuple):
    """A command in a documentation page. Commands in a sentence may be shortened; those in a code block are whole."""

    page: str
    words: tuple[str, ...]
    whole: bool


BEFORE_A_COMMAND = r"^(\w+=\S+ +)*(until +|do +)?(\S*/bin/)?(?=mergegate |make |python )"
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def spans(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the code of a page and whether it is complete: first the lines of code blocks, then inline code."""
    for _, language, block in FENCE.findall(text):
        if language in ("", "sh", "bash", "shell", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.strip().removeprefix("$ "), True
    for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        yield " ".join(span.split()), False


def alternatives(words: list[str]) -> list[list[str]]:
    """Return each alternative as a command: ``store ls | du`` gives ``store ls`` and ``store du``."""
    first, *others = [list(group) for bar, group in groupby(words, "|".__eq__) if not bar]
    return [first, *([*first[:-1], *other] for other in others)]


def documented() -> list[Documented]:
    found = []
    for page in PAGES:
        for span, whole in spans(page.read_text(encoding="utf-8")):
            for part in re.split(r" \|\| | && |;", re.sub(r"\s+#.*", "", span)):
                command = re.sub(BEFORE_A_COMMAND, "", part.strip())
                command = re.split(r"\s+2?>|\s+&$", command)[0]
                if re.match(r"(mergegate|make|python) ", command):
                    for words in alternatives(shlex.split(command)):
                        found.append(Documented(str(page.relative_to(PROJECT)), tuple(words), whole))
    return found


EVERY = documented()


def of(program: str) -> list[Any]:
    chosen = {(one.page, one.words): one for one in EVERY if one.words[0] == program}.values()
    return [pytest.param(one, id=f"{one.page}: {' '.join(one.words)}") for one in chosen]


def leaf(command: Documented) -> tuple[Any, list[str]]:
    """Return the command below all groups and the words that follow its name."""
    at: Any = MERGEGATE
    rest = list(command.words[1:])
    while hasattr(at, "commands") and rest and not rest[0].startswith("-"):
        if getattr(at, "default_command", None) and rest[0] not in at.commands:
            rest.insert(0, at.default_command)
        assert rest[0] in at.commands, f"no command {rest[0]!r}"
        at = at.commands[rest.pop(0)]
    return at, rest


@pytest.mark.parametrize("command", of("mergegate"))
def test_each_command_takes_what_is_written(command: Documented) -> None:
    at, rest = leaf(command)
    options = [one for one in at.params if one.param_type_name == "option"]
    flags = {name: one for one in options for name in (*one.opts, *one.secondary_opts)}
    places = []
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word in ("-", "--"):
            places.append(word)
            continue
        name, _, value = word.partition("=")
        assert name in flags or name in ("--help", "-h"), f"{' '.join(command.words)}: no option {name}"
        if name in flags and not flags[name].is_flag and not value and rest:
            rest.pop(0)
    slots = [one for one in at.params if one.param_type_name == "argument"]
    assert len(places) <= len(slots) or any(one.nargs == -1 for one in slots), "too many arguments"


@pytest.mark.parametrize("command", [one for one in of("mergegate") if one.values[0].whole])
def test_each_whole_command_is_parsed(command: Documented) -> None:
    """Parse the command as a shell would pass it, which includes required options, types and choices."""
    at, rest = leaf(command)
    if not hasattr(at, "commands") and not {"--help", "-h"} & set(rest):
        at.make_context(at.name, rest)


@pytest.mark.parametrize(
    "words", ["run", "run a.yaml b.yaml", "run --becuse x.yaml", "history --last many", "tune x.yaml --trials 1"]
)
def test_a_wrong_command_is_found(words: str) -> None:
    with pytest.raises(TyperException):
        test_each_whole_command_is_parsed(Documented("page.md", ("mergegate", *words.split()), whole=True))


@pytest.mark.parametrize("command", of("make"))
def test_each_target_of_make_is_there(command: Documented) -> None:
    targets = re.findall(r"^([\w./-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    asked = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    assert [word for word in asked if word not in (*targets, "$(VENV)/ready", ".venv/ready")] == []


@pytest.mark.parametrize("command", of("python"))
def test_each_script_is_there_with_its_options(command: Documented) -> None:
    script, *rest = command.words[1:]
    if script in ("-m", "-c"):
        return
    text = (PROJECT / script).read_text(encoding="utf-8")
    missing = [word for word in rest if word.startswith("--") and f'"{word.partition("=")[0]}"' not in text]
    assert missing == []


# The smallest section of each kind. A documented section is merged into it, so a page can show only a few keys.
MINIMAL: Mapping[str, Any] = {
    "name": "support",
    "recipe": {"merge_method": "linear", "models": [{"model": name, "parameters": {"weight": 0.5}} for name in "ab"]},
    "checks": {"license": {"visibility": "public"}},
    "perplexity": {"documents": "held-out.jsonl"},
}
SECTIONS: Mapping[str, Any] = {
    "evaluate": {"tasks": [{"task": "gsm8k", "guarded_by": "a"}]},
    "judge": {"url": "http://localhost:8000/v1", "model": "judge", "guarded_by": "a", "prompts": "prompts.jsonl"},
    "publish": {"to": "directory", "path": "releases"},
    "shadow": {
        "parent": {"url": "http://localhost:8001/v1"},
        "candidate": {"url": "http://localhost:8002/v1"},
        "judge": {"url": "http://localhost:8003/v1", "model": "judge"},
    },
    "sweep": {"parameters": {"weight": {"low": 0, "high": 1, "start": 0.5}}, "objective": [{"task": "gsm8k"}]},
}
# Keys that tell other files of the docs from a profile.
OTHER_FILES = {
    "part of a recipe": {"models", "slices", "experts", "tokenizer"},
    "lm-eval task": {"task", "task_list", "group"},
    "table of licenses": {"licenses"},
    "workflow, containers or cluster": {"jobs", "services", "apiVersion", "repos", "pull"},
}


class _TaskLoader(yaml.SafeLoader):
    """Accept the tags of lm-eval (``!function``) and of other files."""


_TaskLoader.add_multi_constructor("!", lambda _loader, _suffix, node: node.value)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``; mappings are merged at every level."""
    both = {
        key: merged(base[key], value) if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) else value
        for key, value in changes.items()
    }
    return {**base, **both}


def completed(fragment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the smallest profile that contains ``fragment``."""
    sections = {
        # Another target has other keys, a soup has no parameters, and a recipe is replaced as a whole.
        key: merged(SECTIONS[key], value)
        if key in SECTIONS and isinstance(value, Mapping) and {"publish": "to", "sweep": "soup"}.get(key) not in value
        else merged(MINIMAL[key], value)
        if key in ("checks", "perplexity") and isinstance(value, Mapping)
        else value
        for key, value in fragment.items()
    }
    return {**MINIMAL, **sections}


def documented_yaml() -> list[Any]:
    found = []
    for page in PAGES:
        for number, (indent, language, block) in enumerate(FENCE.findall(page.read_text(encoding="utf-8"))):
            if language in ("yaml", "yml"):
                text = re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
                found.append(pytest.param(text, page, id=f"{page.relative_to(PROJECT)}: block {number}"))
    return found


@pytest.mark.parametrize(("text", "page"), documented_yaml())
def test_each_yaml_block_is_valid(text: str, page: Path) -> None:
    for document in yaml.load_all(text, _TaskLoader):  # a SafeLoader
        if isinstance(document, list) and all("guarded_by" in item for item in document):
            document = {"evaluate": {"tasks": document}}
        if not isinstance(document, Mapping):
            continue
        keys = set(document)
        if "merge_method" in keys:
            own_method = f'name="{document["merge_method"]}"' in page.read_text(encoding="utf-8")
            if "$" not in text and not own_method:  # the profile has the values of a searched recipe
                parse_profile({**MINIMAL, "recipe": document}, "profile.yaml").candidates()
        elif keys & set(Profile.model_fields):
            parse_profile(completed(document), "profile.yaml")
        elif keys & set(Schedules.model_fields):
            parse_schedules(document, "schedules.yaml")
        else:
            assert any(keys & names for names in OTHER_FILES.values()), f"a profile has no key {sorted(keys)}"


def test_a_wrong_key_in_a_fragment_is_found() -> None:
    fragments = ("evaluate: {taks: []}", "shadow: {margin: 3}", "evalute: {tasks: []}")
    for text in (*fragments, "- {task: x, guarded_by: a, n: 1}"):
        with pytest.raises((InvalidInput, AssertionError)):
            test_each_yaml_block_is_valid(text, PROJECT / "README.md")

"""Commands and YAML in the README and docs/ are accepted by the product."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
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
PAGES = sorted(page for name in ("*", "docs/**/*", "dev/**/*", "profiles/**/*") for page in PROJECT.glob(f"{name}.md"))
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


def of(program: str) -> list[Documented]:
    return list({(one.page, one.words): one for one in EVERY if one.words[0] == program}.values())


def require_no_problem(commands: Iterable[Documented], problem_of: Callable[[Documented], object]) -> None:
    """Fail with the page, the words and the problem of each command that has one."""
    assert commands
    found = {f"{one.page}: {' '.join(one.words)}": problem_of(one) for one in commands}
    assert {place: problem for place, problem in found.items() if problem} == {}


def leaf(command: Documented) -> tuple[Any, list[str]]:
    """Return the command below all groups and the words that follow its name."""
    at: Any = MERGEGATE
    rest = list(command.words[1:])
    while hasattr(at, "commands") and rest and not rest[0].startswith("-"):
        if getattr(at, "default_command", None) and rest[0] not in at.commands:
            rest.insert(0, at.default_command)
        assert rest[0] in at.commands, f"no command {rest[0]!r} in {command}"
        at = at.commands[rest.pop(0)]
    return at, rest


def unknown_word(command: Documented) -> str:
    """Return an option or an argument that the command does not take."""
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
        if name not in flags and name not in ("--help", "-h"):
            return name
        if name in flags and not flags[name].is_flag and not value and rest:
            rest.pop(0)
    slots = [one for one in at.params if one.param_type_name == "argument"]
    return "" if len(places) <= len(slots) or any(one.nargs == -1 for one in slots) else places[-1]


def parse_error(command: Documented) -> str:
    """Parse a command as a shell would pass it, which includes required options, types and choices."""
    at, rest = leaf(command)
    if not hasattr(at, "commands") and not {"--help", "-h"} & set(rest):
        try:
            at.make_context(at.name, rest)
        except TyperException as error:
            return str(error) or type(error).__name__
    return ""


def test_each_command_takes_what_is_written() -> None:
    require_no_problem(of("mergegate"), unknown_word)


def test_each_whole_command_is_parsed() -> None:
    require_no_problem([one for one in of("mergegate") if one.whole], parse_error)


@pytest.mark.parametrize(
    "words", ["run", "run a.yaml b.yaml", "run --becuse x.yaml", "history --last many", "tune x.yaml --trials 1"]
)
def test_a_wrong_command_is_found(words: str) -> None:
    command = Documented("page.md", ("mergegate", *words.split()), whole=True)
    assert parse_error(command)
    assert bool(unknown_word(command)) == (words in ("run a.yaml b.yaml", "run --becuse x.yaml"))


def test_each_target_of_make_is_there() -> None:
    targets = re.findall(r"^([\w./-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    known = {*targets, "$(VENV)/ready", ".venv/ready"}
    require_no_problem(
        of("make"),
        lambda one: [word for word in one.words[1:] if "=" not in word and word[0] != "-" and word not in known],
    )


def missing_options(command: Documented) -> list[str]:
    script, *rest = command.words[1:]
    if script in ("-m", "-c"):
        return []
    text = (PROJECT / script).read_text(encoding="utf-8")
    return [word for word in rest if word.startswith("--") and f'"{word.partition("=")[0]}"' not in text]


def test_each_script_is_there_with_its_options() -> None:
    require_no_problem(of("python"), missing_options)


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


def documented_yaml() -> Iterator[tuple[str, Path, str]]:
    """Yield each block of YAML with its page and its place."""
    for page in PAGES:
        for number, (indent, language, block) in enumerate(FENCE.findall(page.read_text(encoding="utf-8"))):
            if language in ("yaml", "yml"):
                text = re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
                yield text, page, f"{page.relative_to(PROJECT)}: block {number}"


def require_valid_yaml(text: str, page: Path) -> None:
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


def test_each_yaml_block_is_valid() -> None:
    problems = {}
    for text, page, place in documented_yaml():
        try:
            require_valid_yaml(text, page)
        except (InvalidInput, AssertionError) as error:
            problems[place] = str(error)
    assert problems == {}


def test_a_wrong_key_in_a_fragment_is_found() -> None:
    fragments = ("evaluate: {taks: []}", "shadow: {margin: 3}", "evalute: {tasks: []}")
    for text in (*fragments, "- {task: x, guarded_by: a, n: 1}"):
        with pytest.raises((InvalidInput, AssertionError)):
            require_valid_yaml(text, PROJECT / "README.md")

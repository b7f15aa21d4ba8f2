"""Every user mistake has a reviewed error message, and ``run`` stops at the first problem that ``check`` finds.

``UPDATE_GOLDEN=1`` rewrites ``golden/mistakes.txt``. Review the new file: each message must name the place,
the value found, the value expected and the remedy, in terms that a user knows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES
from mistakes import MISTAKES, Mistake
from samples import sampled
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).resolve().parents[1] / "publish"))

from hub_look_alike import hub

from mergegate.flows.cli.app import app
from mergegate.flows.preflight import Problems, preflight_profile
from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import EXIT_CODES, MergegateError
from mergegate.tasks.stage.stages import DeclaredStage

PROJECT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "mistakes.txt"
CHECKED = [mistake for mistake in MISTAKES if mistake.command[0] == "check" and mistake.kind != "command"]
# Words for Python programmers: type names, and patterns that only a program can read.
NOT_FOR_PEOPLE = re.compile(
    r"Traceback|<class|NoneType|\b(?:dict|str|int|float|bool|tuple)\b|\^\[|\\\\[dw]|[A-Z][a-z]+Error\b"
    r"|[Ii]nput should|valid (?:dictionary|string|integer)|PosixPath|pydantic"
)


@dataclass(frozen=True)
class Said:
    """The output of a command for one mistake."""

    exit_code: int
    lines: tuple[str, ...]

    @property
    def reason(self) -> str:
        """First reported problem, without its mark."""
        return self.lines[0].removeprefix("✗ ") if self.lines else ""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the directory for all mistakes. They share one store, so their valid parts are checked only once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HF_OIDC_ID_TOKEN", "GITHUB_ACTIONS", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        yield tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def at_the_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a Hub with the gated repository ``acme/gated``."""
    with hub(tmp_path_factory.mktemp("hub")) as server:
        server.add_model("acme/gated", PROFILES / "demo" / "models" / "shifter", gated="manual")
        yield server.url


@pytest.fixture(scope="module")
def said_of(world: Path, at_the_hub: str) -> Callable[[Mistake], Said]:
    """Return a function that maps a mistake to its output, computed once per test process."""
    by_number = cache(lambda number: _said(MISTAKES[number], world / f"{number:03}", at_the_hub))
    return lambda mistake: by_number(MISTAKES.index(mistake))


@pytest.fixture(scope="module")
def said(said_of: Callable[[Mistake], Said]) -> dict[str, Said]:
    """Return the output of every mistake, by title."""
    return {mistake.title: said_of(mistake) for mistake in MISTAKES}


def _reach(url: str, patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Point this process to the Hub at ``url``, with an empty cache and no token."""
    from huggingface_hub import constants

    patch.delenv("HF_HUB_OFFLINE", raising=False)
    patch.setenv("HF_ENDPOINT", url)
    # The library read these from the environment when it was imported.
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))


def _said(mistake: Mistake, place: Path, url: str) -> Said:
    mistake.make(place)
    with pytest.MonkeyPatch.context() as patch:
        if mistake.kind == "hub":
            _reach(url, patch, place.parent / "cache")
        patch.chdir(place)
        patch.setenv("MERGEGATE_HOME", str(place.parent / "home"))
        patch.setenv("COLUMNS", "1000")  # lines that do not wrap match the expected text
        if mistake.kind == "target":
            patch.delenv("HF_HUB_OFFLINE", raising=False)  # The missing token is reported before any request is sent.
        result = CliRunner().invoke(app, list(mistake.command))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    text = result.output
    for path, name in ((place, "."), (place.parent / "home", ".mergegate"), (PROFILES / "demo", "demo")):
        text = text.replace(str(path.resolve()), name).replace(str(path), name)
    text = text.replace(url, "https://hub.example")
    shown = (line.rstrip() for line in _without_places(text).splitlines() if line.strip())
    lines = [line for line in shown if not line.startswith(("· ", "✓ ", "Usage: ", "Try '"))]
    return Said(result.exit_code, tuple(lines))


def _without_places(text: str) -> str:
    """Remove everything that depends on the machine or on the lm-eval version."""
    text = re.sub(r"lm-eval [\d.]+", "lm-eval <version>", re.sub(r"(?<![.\w])\./", "", text))
    # Other tests in this process may have declared stages that no user can name.
    if "expected: one of agreement," not in text:
        return text
    return re.sub(r"(?m)(?<=expected: one of )agreement,.*$", ", ".join(_stages()), text)


def _stages() -> list[str]:
    sources = "".join(file.read_text() for floor in ("flows", "tasks") for file in (PROJECT / floor).rglob("*.py"))
    return sorted(set(re.findall(r'^@(?:value_)?(?:stage|step)\("(\w+)"', sources, re.MULTILINE)))


def _page(said: dict[str, Said]) -> str:
    parts = []
    for mistake in MISTAKES:
        found = said[mistake.title]
        head = f"## {mistake.title}\n$ mergegate {' '.join(mistake.command)}"
        parts.append("\n".join((head, *found.lines, f"exit code {found.exit_code}")))
    return "\n\n".join(parts) + "\n"


@pytest.mark.story
def test_every_error_message_matches_the_reviewed_file(said: dict[str, Said]) -> None:
    page = _page(said)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text()


def test_there_are_enough_of_them_and_each_has_a_title_of_its_own() -> None:
    assert len(MISTAKES) >= 64
    assert len({mistake.title for mistake in MISTAKES}) == len(MISTAKES)


def test_every_mistake_ends_with_a_message_and_a_code_for_it(said: dict[str, Said]) -> None:
    for title, found in said.items():
        assert found.exit_code in (EXIT_CODES["invalid"], EXIT_CODES["refused"]), title
        assert found.lines, title


def test_no_message_uses_programmers_terms(said: dict[str, Said]) -> None:
    odd = {
        title: line
        for title, found in said.items()
        for line in found.lines
        if NOT_FOR_PEOPLE.search(line) and not line.startswith("Error: ")  # Typer writes this line.
    }
    assert odd == {}


@pytest.mark.parametrize("mistake", sampled(CHECKED, CHECKED[::3]), ids=[mistake.title for mistake in CHECKED])
def test_what_check_finds_first_is_what_run_stops_at(
    mistake: Mistake,
    said_of: Callable[[Mistake], Said],
    world: Path,
    at_the_hub: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = world / f"{MISTAKES.index(mistake):03}"
    found = said_of(mistake)
    monkeypatch.chdir(place)
    monkeypatch.setenv("MERGEGATE_HOME", str(world / "home"))
    monkeypatch.setattr(DeclaredStage, "__call__", _without_prefect)
    if mistake.kind == "target":
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if mistake.kind == "hub":
        _reach(at_the_hub, monkeypatch, world / "cache")
    with pytest.raises(MergegateError) as stopped:
        _begin_release(Path("profile.yaml"))
    assert stopped.value.exit_code == found.exit_code
    reason = f"{stopped.value.where}: {stopped.value.found}".splitlines()[0]
    for path, name in ((place, "."), (PROFILES / "demo", "demo")):
        reason = reason.replace(str(path.resolve()), name).replace(str(path), name)
    assert _without_places(reason) == found.reason


def _begin_release(file: Path) -> None:
    """Do what ``run`` does before it merges: ``flows.cli.app._read_profile``, ``flows.release.make_release``."""
    profile = load_profile(file)
    profile.headline()
    preflight_profile(profile, Problems(stop_at_once=True))


def _without_prefect(stage: DeclaredStage[Any, Any, Any], *inputs: Any) -> Any:
    """Build a stage and, like a flow, return its artifact or raise its refusal."""
    made = stage.build(*inputs)
    if (refusal := made.value.refusal()) is not None:
        raise refusal
    return made

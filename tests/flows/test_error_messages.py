"""Every user mistake has a reviewed error message, and ``run`` stops at the first problem that ``check`` finds.

``UPDATE_GOLDEN=1`` rewrites ``golden/mistakes.txt``. Review the new file: each message must name the place,
the value found, the value expected and the remedy, in terms that a user knows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES
from mistakes import MISTAKES, Mistake
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).resolve().parents[1] / "publish"))

from hub_look_alike import hub

from mergegate.flows.cli.app import app
from mergegate.flows.preflight import Problems, preflight_profile
from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import MergegateError
from mergegate.tasks.base.stage.stages import DeclaredStage

PROJECT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "mistakes.txt"
FEW = 5  # One mistake in five is checked by every run of the tests.
CHECKED = [mistake for mistake in MISTAKES if mistake.command[0] == "check" and mistake.kind != "command"]
# Words for Python programmers: type names, and patterns that only a program can read. Typer writes "Error: " lines.
NOT_FOR_PEOPLE = re.compile(
    r"^(?!Error: ).*(?:Traceback|<class|NoneType|\b(?:dict|str|int|float|bool|tuple)\b|\^\[|\\\\[dw]|[A-Z][a-z]+Error\b"
    r"|[Ii]nput should|valid (?:dictionary|string|integer)|PosixPath|pydantic)"
)


@dataclass(frozen=True)
class World:
    """The directory for all mistakes. They share one store, so their valid parts are checked only once."""

    root: Path
    hub: str

    def place(self, mistake: Mistake) -> Path:
        return self.root / f"{MISTAKES.index(mistake):03}"

    @contextmanager
    def entered(self, mistake: Mistake) -> Iterator[None]:
        """Change to the directory of a mistake. Its Hub has an empty cache and knows no token."""
        from huggingface_hub import constants

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.place(mistake))
            patch.setenv("MERGEGATE_HOME", str(self.root / "home"))
            if mistake.kind in ("hub", "target"):  # A target's missing token is reported before any request is sent.
                patch.delenv("HF_HUB_OFFLINE", raising=False)
            if mistake.kind == "hub":
                patch.setenv("HF_ENDPOINT", self.hub)
                # The library read these from the environment when it was imported.
                patch.setattr(constants, "HF_HUB_OFFLINE", False)
                patch.setattr(constants, "HF_HUB_CACHE", str(self.root / "cache"))
                patch.setattr(constants, "HF_TOKEN_PATH", str(self.root / "cache" / "no-token"))
            yield

    def without_paths(self, mistake: Mistake, text: str) -> str:
        """Remove everything that depends on the machine or on the lm-eval version."""
        names = ((self.place(mistake), "."), (self.root / "home", ".mergegate"), (PROFILES / "demo", "demo"))
        for path, name in names:
            text = text.replace(str(path.resolve()), name).replace(str(path), name)
        text = re.sub(r"(?<![.\w])\./", "", text.replace(self.hub, "https://hub.example"))
        text = re.sub(r"lm-eval [\d.]+", "lm-eval <version>", text)
        # Other tests in this process may have declared stages that no user can name.
        if "expected: one of agreement," not in text:
            return text
        return re.sub(r"(?m)(?<=expected: one of )agreement,.*$", ", ".join(_stages()), text)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield the directory for all mistakes, and a Hub with the gated repository ``acme/gated``."""
    with pytest.MonkeyPatch.context() as patch, hub(tmp_path_factory.mktemp("hub")) as server:
        for name in ("HF_TOKEN", "HF_OIDC_ID_TOKEN", "GITHUB_ACTIONS", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        server.add_model("acme/gated", PROFILES / "demo" / "models" / "shifter", gated="manual")
        yield World(tmp_path_factory.mktemp("mistakes"), server.url)


@pytest.fixture(scope="module")
def said_of(world: World) -> Callable[[Mistake], tuple[int, list[str]]]:
    """Return a function that maps a mistake to its exit code and its messages, computed once per test process."""

    def said(number: int) -> tuple[int, list[str]]:
        mistake = MISTAKES[number]
        mistake.make(world.place(mistake))
        with world.entered(mistake):
            result = CliRunner().invoke(app, list(mistake.command))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        lines = [line.rstrip() for line in world.without_paths(mistake, result.output).splitlines() if line.strip()]
        return result.exit_code, [line for line in lines if not line.startswith(("· ", "✓ ", "Usage: ", "Try '"))]

    said = cache(said)
    return lambda mistake: said(MISTAKES.index(mistake))


def _stages() -> list[str]:
    sources = "".join(file.read_text() for floor in ("flows", "tasks") for file in (PROJECT / floor).rglob("*.py"))
    return sorted(set(re.findall(r'^@(?:value_)?(?:stage|step)\("(\w+)"', sources, re.MULTILINE)))


@pytest.mark.story
@pytest.mark.parametrize("step", [FEW, 1])
def test_every_error_message_matches_the_reviewed_file(
    said_of: Callable[[Mistake], tuple[int, list[str]]], step: int
) -> None:
    parts = []
    for mistake in MISTAKES[::step]:
        code, lines = said_of(mistake)
        head = f"## {mistake.title}\n$ mergegate {' '.join(mistake.command)}"
        parts.append("\n".join((head, *lines, f"exit code {code}")))
    if os.environ.get("UPDATE_GOLDEN") and step == 1:
        GOLDEN.write_text("\n\n".join(parts) + "\n")
    assert parts == GOLDEN.read_text().removesuffix("\n").split("\n\n")[::step]


def test_each_reviewed_mistake_has_a_title_a_message_and_a_code_in_terms_of_users() -> None:
    pages = [page.splitlines() for page in GOLDEN.read_text().split("\n\n")]
    assert len({page[0] for page in pages}) == len(MISTAKES)
    for title, _, *messages, code in pages:
        assert code in ("exit code 2", "exit code 3"), title
        assert messages, title
        assert not [line for line in messages if NOT_FOR_PEOPLE.search(line)], title


@pytest.mark.story
@pytest.mark.parametrize("mistake", CHECKED, ids=[mistake.title for mistake in CHECKED])
def test_what_check_finds_first_is_what_run_stops_at(
    mistake: Mistake, said_of: Callable[[Mistake], tuple[int, list[str]]], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines = said_of(mistake)
    monkeypatch.setattr(DeclaredStage, "__call__", _without_prefect)
    with world.entered(mistake), pytest.raises(MergegateError) as stopped:
        _begin_release(Path("profile.yaml"))
    assert stopped.value.exit_code == code
    reason = f"{stopped.value.where}: {stopped.value.found}".splitlines()[0]
    assert world.without_paths(mistake, reason) == lines[0].removeprefix("✗ ")


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

"""``mergegate shadow PROFILE`` shadows the current release, even if it shadowed an older one before."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvicorn
import yaml
from rich.console import Console

from mergegate.flows.cli.shadow import run_proxy
from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import Refused
from mergegate.tasks.publish.targets.directory import DirectoryTarget
from mergegate.tasks.shadow import Routing, read_routing, routing_file, write_routing


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a profile with a publish target and a section ``shadow``; no server is started."""
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(uvicorn, "run", lambda *_args, **_named: None)
    servers = {name: {"url": "http://127.0.0.1:1/v1"} for name in ("parent", "candidate")}
    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    shadow = {**servers, "judge": {"url": "http://127.0.0.1:1/v1", "model": "j"}, "listen": "127.0.0.1:0"}
    content = {"name": "watched", "recipe": recipe, "shadow": shadow}
    content |= {"publish": {"path": str(tmp_path / "releases")}, "perplexity": {"documents": "held-out.jsonl"}}
    file = tmp_path / "watched.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def release(place: Path, version: str) -> None:
    (place / "releases" / version).mkdir(parents=True)
    latest = place / "releases" / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(version)


def watched_now(profile: Path, candidate: str | None = None, *, reset: bool = False) -> Routing:
    run_proxy(load_profile(profile), candidate, Console(quiet=True), reset=reset)
    found = read_routing(routing_file("watched"))
    assert found is not None
    return found


def test_a_newer_release_is_watched_without_the_decision_of_the_older_one(profile: Path) -> None:
    release(profile.parent, "aaa")
    assert watched_now(profile).candidate == "aaa"
    write_routing(routing_file("watched"), Routing(candidate="aaa", since=1.0, serving="killed", why="slow"))
    kept = watched_now(profile)
    assert (kept.candidate, kept.serving, kept.since) == ("aaa", "killed", 1.0)
    release(profile.parent, "bbb")
    newer = watched_now(profile)
    assert (newer.candidate, newer.serving) == ("bbb", "watch")
    assert watched_now(profile, "aaa").candidate == "aaa"


def test_an_unreachable_target_does_not_stop_the_proxy(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release(profile.parent, "aaa")
    assert watched_now(profile).candidate == "aaa"

    def out_of_reach(*_: object) -> None:
        raise Refused("publish", found="no answer", expected="an answer")

    monkeypatch.setattr(DirectoryTarget, "current_release", out_of_reach)
    assert watched_now(profile).candidate == "aaa"
    assert watched_now(profile, reset=True).candidate == "aaa"

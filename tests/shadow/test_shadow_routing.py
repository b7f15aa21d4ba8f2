"""Routing: which arm a user gets, which requests are copied, and which release is the candidate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mergegate.flows.cli.shadow import run_proxy
from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import Refused
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget
from mergegate.tasks.shadow import Routing, ShadowSettings, read_routing, routing_file, write_routing
from mergegate.tasks.shadow.routing import goes_to_candidate
from mergegate.tasks.shadow.traffic.request import SessionSecret, may_be_copied, session_hash, session_key

CHAT = "/v1/chat/completions"


@settings(max_examples=30)
@given(st.text(), st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_only_adds_users(key: str, salt: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert goes_to_candidate(key, salt, large) >= goes_to_candidate(key, salt, small)
    assert goes_to_candidate(key, salt, 1.0)
    assert not goes_to_candidate(key, salt, 0.0)


def test_the_share_is_accurate_and_each_candidate_gets_different_users() -> None:
    keys = [f"user {number}" for number in range(20_000)]
    first, second = ({key for key in keys if goes_to_candidate(key, salt, 0.1)} for salt in ("v1", "v2"))
    for users in (first, second):  # Within four standard deviations of a binomial.
        assert abs(len(users) - 2000) < 4 * (20_000 * 0.1 * 0.9) ** 0.5
    assert abs(len(first & second) - 200) < 4 * (20_000 * 0.01 * 0.99) ** 0.5


@pytest.mark.parametrize(
    ("headers", "body", "key"),
    [
        ({"x-session-id": "s", "authorization": "Bearer t"}, {"user": "u"}, "session s"),
        ({"authorization": "Bearer t"}, {"user": "u"}, "user u"),
        ({"authorization": "Bearer t"}, {"user": 7}, "token Bearer t"),
        ({}, None, "client 1.2.3.4"),
    ],
)
def test_the_session_key_prefers_the_session_header_over_the_address(headers: Any, body: Any, key: str) -> None:
    assert session_key(headers, body, "X-Session-Id", "1.2.3.4") == key


def test_session_hashes_need_a_private_secret_that_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "shadow" / "watched.session-secret"
    secret = SessionSecret(file, 3600).current()
    assert SessionSecret(file, 3600).current() == secret
    assert file.stat().st_mode & 0o777 == 0o600
    keys = secret, SessionSecret(None, 3600).current(), b"v1", b""
    assert len({session_hash("client 10.0.0.1", candidate, key) for key in keys for candidate in ("v1", "v2")}) == 8
    for damaged in (file.read_text().replace("[", "[9"), '[1, ""]', "", "[]"):
        file.write_text(damaged)
        assert (replaced := SessionSecret(file, 3600).current()) != secret
        assert SessionSecret(file, 3600).current() == replaced
    assert SessionSecret(file, 1e-9).current() != replaced
    file.unlink()
    file.mkdir()
    assert len(SessionSecret(file, 3600).current()) == 64
    SessionSecret(Path("/proc/none/secret"), 3600).current()  # a disk that cannot be written


def test_a_server_key_requires_keys_of_clients() -> None:
    server = {"url": "http://127.0.0.1:1/v1"}
    arms = {"parent": server, "candidate": {**server, "api_key_env": "KEY"}, "judge": {**server, "model": "j"}}
    with pytest.raises(ValueError, match="'api_key_env' requires 'client_keys_env'"):
        ShadowSettings.model_validate(arms)
    assert ShadowSettings.model_validate({**arms, "client_keys_env": "KEYS"}).client_keys_env == "KEYS"


@pytest.mark.parametrize(
    ("method", "path", "more", "may"),
    [
        ("POST", CHAT, {}, True), ("POST", "/v1/completions/", {}, True),
        ("POST", CHAT, {"store": False, "tools": [{"type": "function"}]}, True), ("GET", CHAT, {}, False),
        ("POST", "/v1/responses", {}, False), ("POST", "/v1/files", {}, False), ("POST", "/v1/batches", {}, False),
        ("POST", CHAT, {"store": True}, False), ("POST", CHAT, {"previous_response_id": "r"}, False),
        ("POST", CHAT, {"tools": [{"type": "function"}, {"type": "web_search"}]}, False),
        ("POST", CHAT, {"tools": "all"}, False),
    ],
)  # fmt: skip
def test_only_requests_without_side_effects_are_copied(method: str, path: str, more: Any, may: bool) -> None:
    assert may_be_copied(method, path, {"model": "m", "messages": [], **more}) is may
    assert not may_be_copied(method, path, None)


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a profile with a publish target and a section ``shadow``; no server is started."""
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_args, **_named: None)
    server = {"url": "http://127.0.0.1:1/v1"}
    shadow = {"parent": server, "candidate": server, "judge": {**server, "model": "j"}, "listen": "127.0.0.1:0"}
    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    content = {"name": "watched", "recipe": recipe, "shadow": shadow}
    content |= {"publish": {"path": str(tmp_path / "releases")}, "perplexity": {"documents": "held-out.jsonl"}}
    file = tmp_path / "watched.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def release(directory: Path, version: str) -> None:
    (directory / "releases" / version).mkdir(parents=True)
    latest = directory / "releases" / "latest"
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

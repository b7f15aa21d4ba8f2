"""Rules for routing users to arms and for copying requests, tested with generated requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.tasks.shadow.routing import goes_to_candidate
from mergegate.tasks.shadow.traffic.request import may_be_copied, session_hash, session_key

QUESTION = {"model": "m", "messages": []}
CHAT = "/v1/chat/completions"


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


def test_the_session_key_prefers_the_session_header_over_the_address() -> None:
    said: dict[str, Any] = {"x-session-id": "s", "authorization": "Bearer t"}
    body = {"user": "u"}
    assert session_key(said, body, "X-Session-Id", "1.2.3.4") == "session s"
    del said["x-session-id"]
    assert session_key(said, body, "X-Session-Id", "1.2.3.4") == "user u"
    assert session_key(said, {"user": 7}, "X-Session-Id", "1.2.3.4") == "token Bearer t"
    assert session_key({}, None, "X-Session-Id", "1.2.3.4") == "client 1.2.3.4"
    assert "Bearer t" not in session_hash("token Bearer t", "v1")
    assert session_hash("token Bearer t", "v1") != session_hash("token Bearer t", "v2")


@pytest.mark.parametrize(
    ("method", "path", "more", "may"),
    [
        ("POST", CHAT, {}, True),
        ("POST", "/v1/completions/", {}, True),
        ("POST", CHAT, {"store": False, "tools": [{"type": "function"}]}, True),
        ("GET", CHAT, {}, False),
        ("POST", "/v1/responses", {}, False),
        ("POST", "/v1/files", {}, False),
        ("POST", "/v1/batches", {}, False),
        ("POST", CHAT, {"store": True}, False),
        ("POST", CHAT, {"previous_response_id": "r"}, False),
        ("POST", CHAT, {"tools": [{"type": "function"}, {"type": "web_search"}]}, False),
        ("POST", CHAT, {"tools": "all"}, False),
    ],
)
def test_only_requests_without_side_effects_are_copied(method: str, path: str, more: Any, may: bool) -> None:
    assert may_be_copied(method, path, {**QUESTION, **more}) is may
    assert not may_be_copied(method, path, None)

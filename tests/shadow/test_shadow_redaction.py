"""Redaction removes secrets from bodies, however they are encoded or split."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.shadow.traffic import Redaction, open_redaction

SECRET = "4111-1111-1111-1111"
PATTERN = r"\d{4}-\d{4}-\d{4}-\d{4}"
CHANGE = Redaction([PATTERN])
LEAVES = st.text(max_size=8) | st.integers() | st.booleans() | st.none()
DOCUMENTS = st.recursive(
    LEAVES,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
)


def hidden(value: Any, where: int) -> Any:
    """Return `value` with the secret inserted in one of its texts or field names."""
    if isinstance(value, dict) and value:
        key = sorted(value)[where % len(value)]
        if where % 2:
            return {**{k: v for k, v in value.items() if k != key}, f"{key}{SECRET}": value[key]}
        return {**value, key: hidden(value[key], where // 2)}
    if isinstance(value, list) and value:
        at = where % len(value)
        return [*value[:at], hidden(value[at], where // 2), *value[at + 1 :]]
    return f"before {SECRET} after"


@given(DOCUMENTS, st.integers(0, 99), st.booleans())
def test_a_secret_anywhere_in_a_document_is_redacted(document: Any, where: int, escaped: bool) -> None:
    body = json.dumps(hidden(document, where))
    if escaped:  # Every character is written as a JSON escape.
        body = body.replace(SECRET, "".join(f"\\u{ord(letter):04x}" for letter in SECRET))
    kept = CHANGE.body(body.encode())
    assert SECRET not in json.dumps(json.loads(kept))
    assert "[redacted]" in kept.decode()


@given(st.lists(st.integers(0, 40), max_size=12), st.booleans())
def test_a_secret_split_over_stream_events_is_redacted(cuts: list[int], interleaved: bool) -> None:
    text = f"take {SECRET}, and more of it"
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events = []
    for start, end in itertools.pairwise(ends):
        choices = [{"index": 1, "delta": {"content": text[start:end]}}]
        if interleaved:
            choices.insert(0, {"index": 0, "delta": {"content": "-"}})
        events.append(b"data: " + json.dumps({"id": "c", "choices": choices}).encode() + b"\n\n")
    kept = CHANGE.body(b": comment 4111-1111-1111-1111\n\n" + b"".join(events) + b"data: [DONE]\n\n")
    said = ""
    for line in kept.decode().splitlines():
        if line.startswith("data: {"):
            said += "".join(c["delta"]["content"] for c in json.loads(line[6:])["choices"] if c["index"] == 1)
    assert said == text.replace(SECRET, "[redacted]")
    assert "1111" not in kept.decode()


@given(DOCUMENTS)
def test_a_document_without_a_secret_is_unchanged(document: Any) -> None:
    assert json.loads(Redaction(["never said"]).body(json.dumps(document).encode())) == document


@given(st.binary())
def test_without_patterns_bodies_are_unchanged(body: bytes) -> None:
    assert Redaction([]).body(body) is body


@pytest.mark.parametrize("body", [b"no JSON", b'{"cut off": "', b"data: {\n\n", b"\xff\xfe", b"[" * 100_000])
def test_an_unreadable_body_is_rejected(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        CHANGE.body(body)


def test_numbers_are_redacted_as_text() -> None:
    assert json.loads(Redaction([r"^4{16}$"]).body(b'{"card": 4444444444444444, "n": 4}')) == {
        "card": "[redacted]",
        "n": 4,
    }


def test_a_custom_function_is_applied_last() -> None:
    change = open_redaction([PATTERN], "builtins:repr")
    assert json.loads(change.body(b'["a"]')) == ["'a'"]
    with pytest.raises(ValueError, match="TypeError"):
        open_redaction([], "builtins:pow").body(b'["a"]')


@pytest.mark.parametrize("named", ["nowhere_at_all:f", "json:nothing", "json:__name__"])
def test_a_missing_redaction_function_is_refused_at_start(named: str) -> None:
    with pytest.raises(InvalidInput, match="redactor"):
        open_redaction([], named)

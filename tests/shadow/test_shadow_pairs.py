"""Sampling of pairs for the judge: one per session, chosen by hash; pairs without plain text are only counted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from recorded_traffic import CHAT, answer, chat, pair, recorded_answer, stream

from mergegate.tasks.shadow.arms import RecordedPair
from mergegate.tasks.shadow.pairs import FAILED, SAME_SESSION, Sample, Unreadable, answer_in, question_in, sample_pairs


def sampled(pairs: Sequence[RecordedPair], judged: dict[str, str] | None = None, most: int = 1000) -> Sample:
    return sample_pairs(lambda: sorted(pairs, key=lambda one: one.parent.at), judged_requests=judged or {}, limit=most)


TRAFFIC = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["good", "bad", ""])), max_size=30)


@settings(max_examples=30)
@for_all(TRAFFIC, st.lists(st.booleans(), min_size=30, max_size=30))
def test_each_session_has_one_pair_whatever_is_answered(traffic: list[tuple[int, str]], swapped: list[bool]) -> None:
    pairs = [pair(n, f"s{session}", candidate=text) for n, (session, text) in enumerate(traffic)]
    exchanged = [
        one._replace(parent=one.candidate, candidate=one.parent) if swap else one
        for one, swap in zip(pairs, swapped, strict=False)
    ]
    chosen = sampled(pairs)
    assert {one.session for one in chosen.pairs} == {one.parent.session for one in pairs}
    assert len(chosen.pairs) == len({one.session for one in chosen.pairs})
    assert [one.answers.id for one in sampled(exchanged).pairs] == [one.answers.id for one in chosen.pairs]
    assert [one.at for one in chosen.pairs] == sorted(one.at for one in chosen.pairs)
    assert chosen.left_out.get(SAME_SESSION, 0) + len(chosen.pairs) == len(pairs)


@settings(max_examples=30)
@for_all(TRAFFIC, st.integers(1, 4))
def test_later_looks_only_add_pairs_and_skip_none(traffic: list[tuple[int, str]], most: int) -> None:
    pairs = [pair(n, f"s{session}", candidate=text) for n, (session, text) in enumerate(traffic)]
    judged: dict[str, str] = {}
    for seen in (len(pairs) // 2, *[len(pairs)] * 6):
        look = sampled(pairs[:seen], judged, most)
        assert len(look.pairs) <= most
        assert judged.keys().isdisjoint(one.session for one in look.pairs)
        judged |= {one.session: one.answers.id for one in look.pairs}
    assert judged.keys() == {one.parent.session for one in pairs}


def test_a_half_judged_pair_is_finished_first() -> None:
    pairs = [pair(n, f"s{n % 5}") for n in range(40)]
    look = sample_pairs(lambda: pairs, judged_requests={"s4": "request-39"}, half_judged=["request-39"], limit=2)
    assert look.pairs[0].answers.id == "request-39"
    assert len({one.session for one in look.pairs}) == 2


def test_an_unanswered_request_is_counted_and_not_replaced() -> None:
    broken = [
        pair(0, candidate=recorded_answer("good", status=500)),
        pair(1, parent=recorded_answer("good", error="ReadError")),
        pair(2, candidate=recorded_answer(stream("go", ends=False))),
        pair(3, path="/v1/embeddings"),
        pair(4),
    ]
    look = sampled(broken)
    assert [one.answers.id for one in look.pairs] == ["request-4"]
    assert look.left_out == {FAILED: 2, "a truncated stream": 1, "neither a chat nor a completion request": 1}


def test_a_conversation_includes_speakers_tools_and_parts() -> None:
    parts = [{"type": "text", "text": "and"}, {"type": "text", "text": "this?"}]
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"b": 1, "a": 2}'}}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "x", "content": "a cat"}, {"role": "user", "content": parts}]
    asked = {"messages": messages, "tools": [{"type": "function", "function": {"name": "look"}}]}
    assert question_in(CHAT, json.dumps(asked).encode()) == (
        'Tools: look\n\nSystem: be brief\n\nUser: what?\n\nAssistant: [calls look({"a": 2, "b": 1})]\n\n'
        "Tool: a cat\n\nUser: and\nthis?"
    )
    assert question_in(CHAT, chat("one only")) == "one only"
    assert question_in("/v1/completions?x=1", b'{"prompt": ["go on"]}') == "go on"


def called(arguments: str, *, streamed: bool) -> bytes:
    function = {"name": "look", "arguments": arguments}
    if not streamed:
        return answer("", tool_calls=[{"id": "1", "type": "function", "function": function}])
    halves = [{"name": "look", "arguments": arguments[:4]}, {"arguments": arguments[4:]}]
    choices: list[dict[str, Any]] = [{"delta": {"tool_calls": [{"index": 0, "function": half}]}} for half in halves]
    choices.append({"delta": {}, "finish_reason": "tool_calls"})
    events = [json.dumps({"choices": [{"index": 0, **choice}]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in events).encode()


@pytest.mark.parametrize(
    ("text", "bodies"),
    [
        (
            "so it is: ünd",
            [
                answer("so it is: ünd"),
                answer([{"type": "text", "text": "so it is: ünd"}]),  # type: ignore[arg-type]
                stream("so it", " is", ": ünd"),
                stream("so it is: ünd", newline="\r\n"),
                b": ping\n\n" + stream("so it is: ünd").removesuffix(b"\n"),
                gzip.compress(answer("so it is: ünd")),
                gzip.compress(stream("so it ", "is: ünd")),
            ],
        ),
        (
            '[calls look({"a": 1, "b": 2})]',
            [called('{"b":2, "a":1}', streamed=False), called('{"a": 1, "b": 2}', streamed=True)],
        ),
    ],
    ids=["text", "tool"],
)
def test_every_encoding_of_an_answer_gives_the_same_text(text: str, bodies: list[bytes]) -> None:
    assert {answer_in(CHAT, body).text for body in bodies} == {text}


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        (b"{", "the request is not JSON"),
        (chat("x", n=2), "several answers to one request"),
        (chat(), "a chat without messages"),
        (chat("x", "and then"), "a request to continue a partial answer"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "not text"),
        (b'{"messages": [{"role": "oracle"}, {"role": "oracle"}]}', "a message with an unknown role"),
    ],
)
def test_a_request_that_is_not_text_has_a_reason(request_body: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        question_in(CHAT, request_body)


@settings(max_examples=30)
@for_all(st.data())
def test_a_truncated_answer_is_never_read_as_complete(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from([answer("a long answer"), stream("a long", " answer")]))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with suppress(Unreadable):
        assert answer_in(CHAT, cut).text == "a long answer"  # Only the end-of-stream marker is missing.


FIELDS = (
    *("choices", "message", "delta", "content", "tool_calls", "function", "index", "error", "messages", "role"),
    *("text", "type", "arguments", "name"),
)


@settings(max_examples=30)
@for_all(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
            max_leaves=12,
        ).map(lambda said: json.dumps(said).encode()),
    )
)
def test_arbitrary_bodies_do_not_break_the_reader(body: bytes) -> None:
    for read, shaped in (
        (question_in, body),
        (answer_in, body),
        (answer_in, b"data: " + body + b"\n\n"),
        (question_in, b'{"messages": [' + body + b"]}"),
        (answer_in, b'{"choices": [{"message": ' + body + b"}]}"),
        (answer_in, b'data: {"choices": [{"delta": ' + body + b"}]}\n\n"),
    ):
        with suppress(Unreadable):
            assert read(CHAT, shaped) is not None

"""Details for ``-v``: collected from any thread, only while a listener is active, and without secrets."""

from __future__ import annotations

import threading

import pytest

from mergegate.merge_core.wording import detail, detail_listener, has_detail_listener


def test_lines_are_heard_from_any_thread_and_only_while_somebody_listens() -> None:
    heard: list[str] = []
    detail("before")
    assert not has_detail_listener()
    with detail_listener(heard.append):
        assert has_detail_listener()
        thread = threading.Thread(target=detail, args=("process %d", 7))
        thread.start()
        thread.join()
    detail("after")
    assert heard == ["process 7"]


class Odd:
    def __str__(self) -> str:
        raise ValueError


def test_a_line_that_cannot_be_made_is_no_end_of_anything() -> None:
    with detail_listener(lambda line: None):
        detail("%s", Odd())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("GET https://me:hunter22@host/x", "GET https://***@host/x"),
        ("vllm serve --api-key abc --port 1", "vllm serve --api-key *** --port 1"),
        ("vllm serve --api-key=abc", "vllm serve --api-key=***"),
        ("echo hf_in_the_environment", "echo ***"),
        ("reads \x1b[2Jmodel", "reads \\x1b[2Jmodel"),
        ("merge: key 5f0c12 of version 3 · tokenizer 9c", "merge: key 5f0c12 of version 3 · tokenizer 9c"),
    ],
)
def test_secrets_are_hidden_and_terminal_codes_are_spelled_out(
    line: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_in_the_environment")
    lines: list[str] = []
    with detail_listener(lines.append):
        detail("%s", line)
    assert lines == [told]

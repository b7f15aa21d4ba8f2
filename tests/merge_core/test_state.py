"""Damaged state is a miss: it is deleted or set aside, and built again."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from garbage import CONTENT, DAMAGE
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from samples import sampled

from mergegate.merge_core import files
from mergegate.merge_core.files.records import JOURNAL, JournalLocation
from mergegate.merge_core.files.state import sqlite_is_damaged
from mergegate.tasks.base.store import MANIFEST, VALUE, Store, examine_store, mend_state

KEY = "0123456789abcdef" * 4
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
damages = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())


class Value(BaseModel):
    words: str | float


def makes(out: Path) -> Value:
    (out / "sub").mkdir()
    (out / "sub" / "weights").write_text("abc")
    return Value(words="abc")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(b"abc")
    return tmp_path / "weights"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "hashes.sqlite"


@damages
def test_reading_any_kind_of_damage_returns_a_value_or_reports_damage(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "state"
    path.write_text('{"words": "abc"}')
    damage(path)
    found = files.read_state(path, Value.model_validate_json)
    assert isinstance(found, files.Damaged) or (found == Value(words="abc") and os.geteuid() == 0)
    assert "\n" not in str(found)


@settings(max_examples=40)
@given(CONTENT | JSON.map(lambda value: json.dumps(value).encode()))
def test_reading_state_accepts_any_content(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "state"
        path.write_bytes(content)
        assert isinstance(files.read_state(path, Value.model_validate_json), (files.Damaged, Value))


def test_a_missing_file_is_not_damage_but_an_oversized_one_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read_state(tmp_path / "nothing", bytes) is None
    assert files.read_state(tmp_path / "file" / "below", bytes) is None
    assert files.read_state(tmp_path / "file", bytes, most=5) == b"12345"
    assert isinstance(files.read_state(tmp_path / "file", bytes, most=4), files.Damaged)


def test_exhausted_machine_limits_are_not_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(OSError, match="Too many open files"):
        files.read_state(tmp_path / "state", bytes)


def test_set_aside_files_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for number in range(3):
        path.write_text(str(number))
        files.set_aside_damaged(path, "damaged")
    kept = {place.name: place.read_text() for place in tmp_path.iterdir()}
    assert kept == {f"state.damaged-{number}": str(number - 1) for number in (1, 2, 3)}


def test_the_target_of_a_link_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "others").write_text("precious")
    (tmp_path / "state").symlink_to("others")
    files.write_state(tmp_path / "state", b"ours")
    assert (tmp_path / "others").read_text() == "precious"
    assert (tmp_path / "state").read_bytes() == b"ours"
    assert names(tmp_path) == ["others", "state"]
    files.set_aside_damaged(tmp_path / "state", "damaged")
    (tmp_path / "state").symlink_to("others")
    files.set_aside_damaged(tmp_path / "state", "damaged")
    assert (tmp_path / "others").read_text() == "precious"


def test_concurrent_creation_of_one_directory_or_file_is_safe(tmp_path: Path) -> None:
    meet = threading.Barrier(8)

    def makes_them(number: int) -> None:
        for turn in range(40):
            meet.wait(60)
            place = files.state_directory(tmp_path / f"{turn}" / "inner", private=True)
            (place / f"{number}").touch()
            files.write_state(tmp_path / f"{turn}.json", b"the same")

    threads = [threading.Thread(target=makes_them, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [path.name for path in tmp_path.rglob("*.damaged-*")] == []
    assert all(len(names(tmp_path / f"{turn}" / "inner")) == 8 for turn in range(40))


@damages
@pytest.mark.parametrize("part", sampled(("", MANIFEST, VALUE, "sub/weights", "sub"), (MANIFEST,)))
def test_an_artifact_is_rebuilt_after_any_damage(tmp_path: Path, part: str, damage: Callable[[Path], None]) -> None:
    store = Store(tmp_path)
    first, _ = store.build("merge", KEY, Value, makes)
    try:
        damage(first.directory / part)
        again, _ = store.build("merge", KEY, Value, makes)
        assert again == first
        assert (again.directory / "sub" / "weights").read_text() == "abc"
        found, made = store.build("merge", KEY, Value, makes)
        assert (found, made) == (first, False)
    finally:
        for path in (first.directory, *first.directory.parent.iterdir()):
            path.is_symlink() or path.chmod(0o700)


@damages
def test_a_value_is_recomputed_after_any_damage_to_its_file(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = Store(tmp_path)
    first, _ = store.build_value("gate", KEY, Value, lambda: Value(words="abc"))
    (file,) = (tmp_path / "gate").iterdir()
    damage(file)
    again, _ = store.build_value("gate", KEY, Value, lambda: Value(words="abc"))
    assert again == first
    assert store.build_value("gate", KEY, Value, lambda: pytest.fail("made again")) == (first, False)


@pytest.mark.story
@settings(max_examples=25)  # Each example builds an artifact.
@given(st.data())
def test_any_altered_byte_of_a_manifest_or_value_is_detected(data: st.DataObject) -> None:
    """Accepted content has the same meaning: whitespace does not count, and the stage name is informational."""
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        first, _ = store.build("merge", KEY, Value, makes)
        value, _ = store.build_value("gate", KEY, Value, lambda: Value(words="abc"))
        (file,) = (Path(directory) / "gate").iterdir()
        for path in (first.directory / MANIFEST, first.directory / VALUE, file):
            content = bytearray(path.read_bytes())
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
            path.write_bytes(content)
        again, _ = store.build("merge", KEY, Value, makes)
        assert again == first
        assert store.build_value("gate", KEY, Value, lambda: Value(words="abc"))[0] == value


def test_files_outside_the_artifact_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    first, _ = store.build("merge", KEY, Value, makes)
    (tmp_path / "secret").write_text("abc")
    manifest = json.loads((first.directory / MANIFEST).read_text())
    manifest["files"]["../../../secret"] = manifest["files"]["sub/weights"]
    (first.directory / MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setattr(files.hashing, "sha256_file", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(Exception, match=r"secret is missing"):
        store.open("merge", KEY, Value)


PLACES = ("", "merge", "locks", f"merge/{KEY[:32]}.partial", f"locks/merge-{KEY[:32]}")


@damages
@pytest.mark.parametrize("place", sampled(PLACES, PLACES[-1:]))
def test_obstacles_in_the_store_are_removed(tmp_path: Path, place: str, damage: Callable[[Path], None]) -> None:
    root = tmp_path / "store"
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).write_text("a file")
    damage(root / place)
    for resumable in (False, True):
        artifact, made = Store(root).build("merge", KEY, Value, makes, resumable=resumable)
        assert made is not resumable
        assert artifact.value.words == "abc"


@damages
@pytest.mark.parametrize("suffix", sampled(("", "-journal", "-wal"), ("",)))
def test_hashes_are_recomputed_after_any_damage_to_the_table(
    weights: Path, database: Path, suffix: str, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = files.sha256_file(weights)
    files.HashMemo(database).sha256(weights)
    damage(database.with_name(database.name + suffix))
    assert files.HashMemo(database).sha256(weights) == wanted
    files.HashMemo(database).sha256(weights)
    monkeypatch.setattr(files.hashing, "sha256_file", lambda path: pytest.fail("read again"))
    assert files.HashMemo(database).sha256(weights) == wanted


COLUMNS = "device INTEGER, inode INTEGER, size INTEGER, mtime_ns INTEGER, sha256 TEXT"


@pytest.mark.parametrize(
    "schema",
    [
        "CREATE TABLE hashes (name TEXT)",
        "CREATE TABLE hashes (name TEXT, sha256 TEXT)",
        "CREATE VIEW hashes AS SELECT 1 AS sha256",
        f"CREATE TABLE hashes ({COLUMNS}, more TEXT)",
        f"CREATE TABLE hashes ({COLUMNS}, PRIMARY KEY (device, inode))",  # With a row of the same file.
    ],
)
def test_a_table_with_another_schema_is_rebuilt(
    tmp_path: Path, weights: Path, database: Path, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, status = files.sha256_file(weights), weights.stat()
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(schema)
        if "KEY" in schema:
            row = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, "of another file")
            connection.execute("INSERT INTO hashes VALUES (?, ?, ?, ?, ?)", row)
    assert files.HashMemo(database).sha256(weights) == wanted
    monkeypatch.setattr(files.hashing, "sha256_file", lambda path: pytest.fail("read again"))
    assert files.HashMemo(database).sha256(weights) == wanted
    assert not [name for name in names(tmp_path) if "damaged" in name]


@pytest.mark.parametrize("remembered", ["", "f" * 63, "not hex" * 9, b"\xff" * 64, 3, None])
def test_an_invalid_hash_is_ignored(weights: Path, database: Path, remembered: object) -> None:
    files.HashMemo(database).sha256(weights)
    with files.hashing.sqlite3.connect(database) as connection:
        connection.execute("UPDATE hashes SET sha256 = ?", (remembered,))
    connection.close()
    assert files.HashMemo(database).sha256(weights) == files.sha256_file(weights)


def test_a_locked_table_is_not_touched(
    tmp_path: Path, weights: Path, database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memo = files.HashMemo(database)
    memo.sha256(weights)
    monkeypatch.setattr(files.hashing, "_PATIENCE_S", 0.01)
    holder = files.hashing.sqlite3.connect(database, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for _ in range(3):
        assert memo.sha256(weights) == files.sha256_file(weights)
    assert caplog.text.count("database is locked") == 1
    assert set(names(tmp_path)) - {"hashes.sqlite-journal"} == {"hashes.sqlite", "weights"}
    holder.close()


@pytest.mark.parametrize(
    ("code", "is_damage"),
    [
        *((code, False) for code in ("BUSY_SNAPSHOT", "FULL", "IOERR", "PROTOCOL", "READONLY_DBMOVED")),
        *((f"IOERR_{kind}", False) for kind in ("READ", "WRITE", "FSYNC", "LOCK", "NOMEM", "ACCESS", "SHMMAP")),
        *((f"IOERR_{kind}", True) for kind in ("SHORT_READ", "CORRUPTFS", "DATA")),
        *((code, True) for code in ("CORRUPT", "NOTADB", "ERROR", "SCHEMA")),
    ],
)
def test_only_invalid_content_is_damage_to_a_database(tmp_path: Path, code: str, is_damage: bool) -> None:
    error = sqlite3.OperationalError("refused")
    error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{code}")
    assert sqlite_is_damaged(error, tmp_path / "hashes.sqlite") is is_damage


def test_a_table_that_the_machine_cannot_write_keeps_its_rows(tmp_path: Path, weights: Path, database: Path) -> None:
    """The limit on the size of a file makes SQLite fail with an I/O error, as an exhausted disk quota does."""
    files.HashMemo(database).sha256(weights)
    code = "import resource, sys; from pathlib import Path; from mergegate.merge_core.files import HashMemo\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
    code += "print(HashMemo(Path(sys.argv[1])).sha256(Path(sys.argv[2]), trust=False))"
    command = [sys.executable, "-c", code, str(database), str(weights)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "disk I/O error" in done.stderr
    assert done.stdout.strip() == files.sha256_file(weights)
    assert not [name for name in names(tmp_path) if "damaged" in name]
    assert files.HashMemo(database).recall(weights) == files.sha256_file(weights)


@damages
def test_a_journal_continues_after_any_damage(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    place = JournalLocation(tmp_path / JOURNAL, KEY)
    with files.open_journal(place) as journal:
        for number in range(6):
            journal.append([number] * 30)
    damage(place.path)
    with files.open_journal(place) as journal:
        before = journal.records
        journal.append("after")
    assert list(before) == [[number] * 30 for number in range(len(before))]
    with files.open_journal(place) as journal:
        assert journal.records == (*before, "after")


def test_records_after_one_of_another_kind_are_ignored(tmp_path: Path) -> None:
    place = JournalLocation(tmp_path / JOURNAL, KEY)
    with files.open_journal(place) as journal:
        for record in (1, 2, "of an older program", 3):
            journal.append(record)
    with files.open_journal(place, lambda record: isinstance(record, int)) as journal:
        assert journal.records == (1, 2)


@damages
def test_a_lock_works_despite_obstacles_at_its_path(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "lock"
    path.touch()
    damage(path)
    with files.hold_lock(path, remove=True):
        assert path.is_file()
    assert not path.exists()


def test_home_and_store_are_private_except_for_a_sharing_team(tmp_path: Path) -> None:
    root = tmp_path / "home" / "store"
    before = os.umask(0)
    try:
        Store(root).build("merge", KEY, Value, makes)
        assert [path.stat().st_mode & 0o777 for path in (root, root.parent)] == [0o700, 0o700]
        root.chmod(0o755)
        Store(root).build("merge", KEY[::-1], Value, makes)
        assert root.stat().st_mode & 0o777 == 0o700
        root.chmod(0o2775)
        files.state_directory(root, private=True)
        assert root.stat().st_mode & 0o7777 == 0o2770
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_other_users_cannot_read_the_store(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)
    artifact, _ = Store(tmp_path / "home" / "store").build("merge", KEY, Value, makes)
    (tmp_path / "open").write_text("for all")
    code = "import os, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    code += "assert open(sys.argv[1]).read() == 'for all'\nopen(sys.argv[2])"
    weights = artifact.directory / "sub" / "weights"
    command = [sys.executable, "-S", "-c", code, str(tmp_path / "open"), str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr
    assert "home/store" in done.stderr


def test_an_inspection_finds_and_repairs_damage_and_leftovers(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = Store(root)
    sound, _ = store.build("merge", KEY, Value, makes)
    assert list(examine_store(root)) == []
    sick, _ = store.build("merge", KEY[::-1], Value, makes)
    (sick.directory / "sub" / "weights").write_text("longer")
    store.build_value("gate", KEY, Value, lambda: Value(words="abc"))
    record = root / "gate" / f"{KEY[:32]}.json"
    record.write_text(record.read_text().replace('"abc"', "NaN"))
    (root / "gate" / "x.json.77.partial").write_text("{")
    (root / "merge" / f"{'a' * 32}.partial").mkdir()
    (root / "merge" / f"{'b' * 32}.partial").mkdir()
    os.utime(root / "merge" / f"{'b' * 32}.partial", (0, 0))
    (root / "locks" / "of-nobody").touch()
    (root / "hashes.sqlite").write_bytes(b"garbage" * 100)
    kinds = {found.path.name: found.kind for found in examine_store(root)}
    assert kinds == {
        sick.directory.name: "damaged", f"{KEY[:32]}.json": "damaged", "x.json.77.partial": "left over",
        f"{'a' * 32}.partial": "unfinished", f"{'b' * 32}.partial": "abandoned", "of-nobody": "left over",
        "hashes.sqlite": "damaged",
    }  # fmt: skip
    for found in examine_store(root):
        mend_state(found)
    assert [found.kind for found in examine_store(root)] == ["unfinished"]
    assert store.build("merge", KEY, Value, makes) == (sound, False)


def test_files_in_use_are_not_reported(tmp_path: Path) -> None:
    def looks(out: Path) -> Value:
        assert list(examine_store(tmp_path)) == []
        return Value(words="abc")

    Store(tmp_path).build("merge", KEY, Value, looks)

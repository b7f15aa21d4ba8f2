"""The hash memo: never wrong about a changed file, and never rereads an unchanged one."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from mergegate.merge_core.files import hashing
from mergegate.merge_core.files.database import misplaced_file
from mergegate.merge_core.files.hashing import HashMemo


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    memo = HashMemo(tmp_path / "memo.sqlite")
    assert memo.sha256(file) == hashlib.sha256(b"abc").hexdigest()
    monkeypatch.setattr(hashing, "sha256_file", lambda path: "read again")
    assert memo.sha256(file) == hashlib.sha256(b"abc").hexdigest()
    assert memo.sha256(file, trust=False) == "read again"


def test_a_rewritten_file_is_hashed_again(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    memo = HashMemo(tmp_path / "memo.sqlite")
    for content in (b"abc", b"abd", b"abcd"):
        file.write_bytes(content)
        os.utime(file, ns=(0, len(content) * 1000 + content[-1]))  # File system clocks may be coarser than this loop.
        assert memo.sha256(file) == hashlib.sha256(content).hexdigest()


def test_a_replaced_file_is_hashed_again(tmp_path: Path) -> None:
    file, other = tmp_path / "weights", tmp_path / "other"
    file.write_bytes(b"abc")
    memo = HashMemo(tmp_path / "memo.sqlite")
    memo.sha256(file)
    other.write_bytes(b"xyz")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.rename(file)
    assert memo.sha256(file) == hashlib.sha256(b"xyz").hexdigest()


def overwritten(file: Path, content: bytes) -> None:
    """Overwrite the file with different bytes of the same length, and restore its modification time."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


def test_resetting_the_modification_time_does_not_hide_a_change(tmp_path: Path) -> None:
    """Each change follows the previous hash immediately, faster than the clock of a file system ticks."""
    file = tmp_path / "weights"
    memo = HashMemo(tmp_path / "memo.sqlite")
    file.write_bytes(b"000")
    for number in range(50):
        content = f"{number:03}".encode()
        overwritten(file, content)
        assert memo.sha256(file) == hashlib.sha256(content).hexdigest()


def test_a_hash_of_a_file_that_changed_while_it_was_read_is_not_stored(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    memo = HashMemo(tmp_path / "memo.sqlite")
    for number in range(20):
        first, second = f"a{number:03}".encode(), f"b{number:03}".encode()
        file.write_bytes(first)
        memo.remember(file, hashlib.sha256(first).hexdigest())
        overwritten(file, second)
        assert memo.sha256(file) == hashlib.sha256(second).hexdigest()


def old_shape(place: Path) -> None:
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.execute(
            "CREATE TABLE hashes (device INTEGER, inode INTEGER, size INTEGER, mtime_ns INTEGER,"
            " sha256 TEXT, PRIMARY KEY (device, inode))"
        )
        status = (place.parent / "weights").stat()
        row = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, "of another file")
        connection.execute("INSERT INTO hashes VALUES (?, ?, ?, ?, ?)", row)


def another_table(place: Path) -> None:
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.execute("CREATE TABLE hashes (name TEXT)")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "an older table": old_shape,
    "another table": another_table,
    "no database": lambda place: place.write_bytes(b"garbage " * 1000) and None,
    "an empty file": lambda place: place.write_bytes(b"") and None,
    "a directory": lambda place: (place / "with something in it").mkdir(parents=True),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_hash_table_is_set_aside_and_rebuilt(
    tmp_path: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, place = tmp_path / "weights", tmp_path / "memo.sqlite"
    file.write_bytes(b"abc")
    for _ in range(2):  # In the second round, a damaged file has already been set aside.
        place.unlink(missing_ok=True)
        damage(place)
        assert HashMemo(place).sha256(file) == hashlib.sha256(b"abc").hexdigest()
        with monkeypatch.context() as patch:
            patch.setattr(hashing, "sha256_file", lambda path: pytest.fail("read again"))
            assert HashMemo(place).sha256(file) == hashlib.sha256(b"abc").hexdigest()
        assert not list(tmp_path.glob("*.lock"))


def test_without_a_writable_hash_table_files_are_read(tmp_path: Path) -> None:
    file, occupied = tmp_path / "weights", tmp_path / "occupied"
    file.write_bytes(b"abc")
    occupied.write_bytes(b"")
    for _ in range(2):
        assert HashMemo(occupied / "memo.sqlite").sha256(file) == hashlib.sha256(b"abc").hexdigest()


def test_a_locked_hash_table_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, place = tmp_path / "weights", tmp_path / "memo.sqlite"
    file.write_bytes(b"abc")
    memo = HashMemo(place)
    memo.sha256(file)
    connect = sqlite3.connect
    monkeypatch.setattr(hashing.sqlite3, "connect", lambda name, timeout=0: connect(name, timeout=0.01))
    with closing(connect(place, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        assert memo.sha256(file) == hashlib.sha256(b"abc").hexdigest()
    assert place.is_file()
    assert not list(tmp_path.glob("*.damaged-*"))


@pytest.mark.story
def test_a_journal_file_that_disappears_during_the_check_is_ignored(tmp_path: Path) -> None:
    """SQLite creates and removes a journal with every write, while other processes check for misplaced files."""
    database, over = tmp_path / "memo.sqlite", threading.Event()
    journal = tmp_path / "memo.sqlite-journal"

    def write() -> None:
        while not over.is_set():
            journal.touch()
            journal.unlink()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        seen = {misplaced_file(database) for _ in range(10_000)}
        over.set()
        writing.result()
    assert seen == {None}
    journal.mkdir()
    assert misplaced_file(database) == journal

"""The hash memo: never wrong about a changed file, and never rereads an unchanged one."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mergegate.merge_core.files import hashing
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.merge_core.files.state import misplaced_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(b"abc")
    return tmp_path / "weights"


@pytest.fixture
def memo(tmp_path: Path) -> HashMemo:
    return HashMemo(tmp_path / "memo.sqlite")


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_is_hashed_once(file: Path, memo: HashMemo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memo.sha256(file) == digest_of(b"abc")
    monkeypatch.setattr(hashing, "sha256_file", lambda path: "read again")
    assert memo.sha256(file) == digest_of(b"abc")
    assert memo.sha256(file, trust=False) == "read again"


def test_a_rewritten_or_replaced_file_is_hashed_again(file: Path, memo: HashMemo) -> None:
    for content in (b"abc", b"abd", b"abcd"):
        file.write_bytes(content)
        os.utime(file, ns=(0, len(content) * 1000 + content[-1]))  # File system clocks may be coarser than this loop.
        assert memo.sha256(file) == digest_of(content)
    other = file.with_name("other")
    other.write_bytes(b"wxyz")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.rename(file)
    assert memo.sha256(file) == digest_of(b"wxyz")


def overwritten(file: Path, content: bytes) -> None:
    """Overwrite the file with different bytes of the same length, and restore its modification time."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


@pytest.mark.story
def test_resetting_the_modification_time_does_not_hide_a_change(file: Path, memo: HashMemo) -> None:
    """Each change follows the previous hash immediately, faster than the clock of a file system ticks."""
    for number in range(50):
        overwritten(file, f"{number:03}".encode())
        assert memo.sha256(file) == digest_of(f"{number:03}".encode())


@pytest.mark.story
def test_a_hash_of_a_file_that_changed_while_it_was_read_is_not_stored(file: Path, memo: HashMemo) -> None:
    for number in range(20):
        first, second = f"a{number:03}".encode(), f"b{number:03}".encode()
        file.write_bytes(first)
        memo.remember(file, digest_of(first))
        overwritten(file, second)
        assert memo.sha256(file) == digest_of(second)


def test_without_a_writable_hash_table_files_are_read(file: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").touch()
    for _ in range(2):
        assert HashMemo(tmp_path / "occupied" / "memo.sqlite").sha256(file) == digest_of(b"abc")


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

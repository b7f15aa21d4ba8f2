"""The hash memo: never wrong about a file that changed, never reading one that did not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from merge_core.store import hashing
from merge_core.store.hashing import HashMemo


def test_a_hash_is_read_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        os.utime(file, ns=(0, len(content) * 1000 + content[-1]))  # clocks may be coarser than this loop
        assert memo.sha256(file) == hashlib.sha256(content).hexdigest()


def test_a_file_in_place_of_another_is_hashed_again(tmp_path: Path) -> None:
    file, other = tmp_path / "weights", tmp_path / "other"
    file.write_bytes(b"abc")
    memo = HashMemo(tmp_path / "memo.sqlite")
    memo.sha256(file)
    other.write_bytes(b"xyz")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.rename(file)
    assert memo.sha256(file) == hashlib.sha256(b"xyz").hexdigest()

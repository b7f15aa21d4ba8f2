"""A disk that fails at any call: the run ends in one refusal with a remedy, and the next run writes the same bytes."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from faults import disk_fails, files_below
from pydantic import BaseModel

from mergegate.merge_core.errors import DiskUnavailable
from mergegate.merge_core.files import disk_errors_refused, disk_refusal, is_disk_error, open_journal
from mergegate.merge_core.files.records import JOURNAL, JournalLocation
from mergegate.tasks.base.store import MANIFEST, Store

sys.path.insert(0, str(Path(__file__).parents[1] / "merge_core"))

KEY = "0123456789abcdef" * 4
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE)


class Value(BaseModel):
    words: str


def makes(out: Path) -> Value:
    with open_journal(JournalLocation(out / JOURNAL, KEY)) as journal:
        journal.append("half")
        (out / "sub").mkdir(exist_ok=True)
        (out / "sub" / "weights").write_bytes(b"abc" * 1000)
        journal.append("whole")
    return Value(words="abc")


def builds(root: Path) -> None:
    store = Store(root)
    store.build("merge", KEY, Value, makes, resumable=True)
    store.build_value("gate", KEY, Value, lambda: Value(words="abc"))


def artifacts(root: Path) -> dict[str, bytes]:
    """Return all files except the hash memo, whose bytes may differ."""
    return {name: content for name, content in files_below(root).items() if "hashes.sqlite" not in name}


def refused(root: Path) -> DiskUnavailable | None:
    """Return the refusal of a build, or None. A build that loses only its journal or its hash memo succeeds."""
    try:
        with disk_errors_refused(root):
            builds(root)
    except DiskUnavailable as refusal:
        return refusal
    return None


@pytest.mark.story
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("number", DISK, ids=errno.errorcode.get)
def test_a_store_on_a_disk_that_fails_at_any_call_refuses_and_is_whole_the_next_time(
    tmp_path: Path, number: int, once: bool
) -> None:
    builds(tmp_path / "undisturbed")
    wanted = artifacts(tmp_path / "undisturbed")
    with disk_fails(None) as calls:
        builds(tmp_path / "counted")
    assert calls.count > 20
    every = 1 if number == errno.ENOSPC else 5
    for at in range(1, calls.count + 1, every):
        root = tmp_path / f"at-{at}"
        with disk_fails(at, number, once=once) as calls:
            refusal = refused(root)
        assert calls.failed
        assert refusal is None or (refusal.remedy and refusal.exit_code == 3 and "\n" not in refusal.found)
        for manifest in root.rglob(MANIFEST):
            place = manifest.parent
            if not place.name.endswith(".partial"):
                found = artifacts(place)
                found.pop(JOURNAL, None)  # The next lookup removes the journal.
                wanted_files = artifacts(tmp_path / "undisturbed" / place.relative_to(root))
                assert found == wanted_files, "with its name it is whole"
        builds(root)
        left = {name for name in artifacts(root) if name not in wanted}
        assert artifacts(root).items() >= wanted.items(), f"{calls.failed} at {at}"
        assert all(".partial" in name or name.startswith("locks/") for name in left), left


@pytest.fixture
def parents(tmp_path: Path) -> Path:
    from family import random_tensors, save_checkpoint

    base = random_tensors(0)
    save_checkpoint(tmp_path / "base", base, shards=2)
    for seed, name in enumerate("ab", start=1):
        save_checkpoint(tmp_path / name, random_tensors(seed, base), shards=2)
    return tmp_path


RECIPE = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"


@pytest.mark.story
@pytest.mark.parametrize(
    ("number", "every"),
    [
        (errno.ENOSPC, 7),
        *((number, 5) for number in DISK),
        *(pytest.param(number, 1, marks=pytest.mark.proof) for number in DISK),
    ],
)
def test_a_merge_on_a_disk_that_fails_at_any_call_is_finished_by_the_next_one(
    parents: Path, number: int, every: int
) -> None:
    from family import merge_text

    def merge(out: str) -> None:
        merge_text(RECIPE, parents, out, kernels="torch")

    merge("undisturbed")
    wanted = files_below(parents / "undisturbed")
    with disk_fails(None) as calls:
        merge("counted")
    assert calls.count > 5 * every
    for at in range(1, calls.count + 1, every):
        with disk_fails(at, number) as calls, pytest.raises(DiskUnavailable) as refused:
            merge(f"at-{at}")
        assert refused.value.remedy, calls.failed
        there = files_below(parents / f"at-{at}")
        assert "config.json" not in there or there.items() >= wanted.items(), "what looks finished is whole"
        merge(f"at-{at}")
        assert files_below(parents / f"at-{at}") == wanted, f"{calls.failed} at {at}"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), ("/x/y", "the disk is full", "free some space")),
        (OSError(errno.EROFS, "Read-only file system", b"/x"), ("/x", "read-only", "mount")),
        (OSError(errno.EMFILE, "Too many open files"), ("operating system", "Too many open files", "ulimit -n")),
        (OSError(errno.ENAMETOOLONG, "File name too long", "n" * 300), ("nnn", "too long", "shorter")),
        (OSError("strange"), ("operating system", "strange", "run again")),
    ],
)
def test_a_refusal_says_where_what_and_what_to_do(error: OSError, words: tuple[str, ...]) -> None:
    said = str(disk_refusal(error))
    assert all(word in said for word in words), said


def test_a_network_error_is_not_a_disk_error() -> None:
    assert not is_disk_error(ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)))
    with pytest.raises(ConnectionError), disk_errors_refused():
        raise ConnectionResetError(errno.ECONNRESET, "reset")

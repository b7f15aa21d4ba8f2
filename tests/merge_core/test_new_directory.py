"""Files are locked while they are in use, and mergegate deletes only partial directories that carry its mark."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergegate.merge_core.errors import DiskUnavailable, InvalidInput, Refused
from mergegate.merge_core.files import (
    MARK,
    MARK_CONTENT,
    finish_directory,
    hold_lock,
    lock_file,
    new_directory,
    try_open_locked,
)


def snapshot(root: Path) -> dict[str, bytes | str | None]:
    """Return everything below `root`: contents of files, targets of links, None for directories."""

    def content(path: Path) -> bytes | str | None:
        return str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None

    return {path.relative_to(root).as_posix(): content(path) for path in root.rglob("*")}


def leave_half(out: Path) -> None:
    """Leave an unfinished directory, as an interrupted run does."""
    with suppress(KeyboardInterrupt), new_directory(out, resume=True) as output:
        assert (output.parent / MARK).read_bytes() == MARK_CONTENT
        (output / "half").write_text("half")
        raise KeyboardInterrupt


def directory_with(*names: str) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text("of the user")

    return build


def link_to_marked(path: Path) -> None:
    target = path.with_name("of the user")
    target.mkdir()
    (target / MARK).write_bytes(MARK_CONTENT)
    path.symlink_to(target)


def linked_mark(path: Path) -> None:
    mark = path.with_name("text of the user")
    mark.write_bytes(MARK_CONTENT)
    path.mkdir()
    (path / MARK).symlink_to(mark)


def longer_mark(path: Path) -> None:
    path.mkdir()
    (path / MARK).write_bytes(MARK_CONTENT + b"and notes of the user")


FOREIGN = {
    "files": directory_with("notes.txt", "sub/model.safetensors"),
    "names of ours": directory_with("merge.partial", "config.json", "steps.partial/x", "a.journal.partial"),
    "a mark of the user": directory_with(MARK), "a longer mark": longer_mark, "a linked mark": linked_mark,
    "a file": lambda path: path.write_text("of the user") and None,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"), "a link to a marked directory": link_to_marked,
}  # fmt: skip


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("what", FOREIGN)
def test_a_partial_path_without_the_mark_is_refused_and_unchanged(tmp_path: Path, what: str, resume: bool) -> None:
    FOREIGN[what](tmp_path / "o.partial")
    before = snapshot(tmp_path)
    with pytest.raises(InvalidInput) as refusal, new_directory(tmp_path / "o", resume=resume):
        pytest.fail("entered")
    assert str(tmp_path / "o.partial") in str(refusal.value)
    assert snapshot(tmp_path) == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    names=st.sets(
        st.text("ab.-é", min_size=1, max_size=6).filter(lambda name: name.strip(".") and name != "o"), max_size=4
    ),
    fails=st.booleans(),
    resume=st.booleans(),
)
def test_neighboring_files_are_never_removed(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], fails: bool, resume: bool
) -> None:
    root = tmp_path_factory.mktemp("root")
    for name in names:
        (root / name).write_text("of the user")
    for name in (".o.lock", ".o.partial", "o.partial.rows"):
        (root / name).write_text("of the user")
    before = snapshot(root)
    try:
        with new_directory(root / "o", resume=resume) as partial:
            (partial / "file").write_text("new")
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        left = {"o.partial": None, f"o.partial/{MARK}": MARK_CONTENT}
        left |= {"o.partial/output": None, "o.partial/output/file": b"new"}
        assert snapshot(root) == before | (left if resume else {})
    else:
        assert snapshot(root) == before | {"o": None, "o/file": b"new"}


@pytest.mark.parametrize("resume", [True, False])
def test_a_killed_run_is_resumed_or_starts_empty(tmp_path: Path, resume: bool) -> None:
    leave_half(tmp_path / "o")
    with new_directory(tmp_path / "o", resume=resume) as output:
        assert [path.read_text() for path in output.iterdir()] == ["half"] * resume
    assert snapshot(tmp_path) == {"o": None, **({"o/half": b"half"} if resume else {})}


@pytest.mark.parametrize("resume", [False, True])
def test_a_read_only_partial_directory_is_a_permission_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    (tmp_path / "out.partial").mkdir()
    attempts = []

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        attempts.append(path)
        assert len(attempts) < 9, "it tries again and again"
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError), new_directory(tmp_path / "out", resume=resume):
        pass


@pytest.mark.parametrize("flushed", [None, b"", MARK_CONTENT[:20], MARK_CONTENT])
def test_a_directory_with_only_an_incomplete_mark_is_reused(tmp_path: Path, flushed: bytes | None) -> None:
    """A power cut may leave the mark absent, empty or truncated."""
    (tmp_path / "o.partial").mkdir()
    if flushed is not None:
        (tmp_path / "o.partial" / MARK).write_bytes(flushed)
    with new_directory(tmp_path / "o") as output:
        assert (output.parent / MARK).read_bytes() == MARK_CONTENT
    assert snapshot(tmp_path) == {"o": None}


@pytest.mark.parametrize("out", [".", "..", "o/..", "/", "there"])
def test_an_existing_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    before = snapshot(tmp_path)
    with pytest.raises(InvalidInput), new_directory(Path(out)):
        pytest.fail("entered")
    assert snapshot(tmp_path) == before


def test_one_process_writes_a_directory_at_a_time(tmp_path: Path) -> None:
    second = new_directory(tmp_path / "o", resume=True, by="merge")
    with new_directory(tmp_path / "o", resume=True), pytest.raises(Refused, match="another merge is running"):
        second.__enter__()
    assert (tmp_path / "o").is_dir()


def test_leftovers_of_a_run_killed_after_its_rename_are_removed(tmp_path: Path) -> None:
    partial = tmp_path / "o.partial"
    partial.mkdir()
    (partial / MARK).write_bytes(MARK_CONTENT)
    finish_directory(partial)
    assert not partial.exists()
    partial.mkdir()
    (partial / MARK).write_text("of the user")
    finish_directory(partial)
    assert (partial / MARK).read_text() == "of the user"


FLAGS = os.O_RDWR | os.O_CREAT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def waiter(path: Path, order: list[str], leave: threading.Event | None = None, **settings: Any) -> threading.Thread:
    """Start a thread that waits for a lock, and return when it waits."""
    waiting = threading.Event()

    def hold() -> None:
        with hold_lock(path, on_wait=waiting.set, **settings):
            order.append("second")
            if leave:
                leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert waiting.wait(60)
    return thread


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system without locks."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)


def test_a_second_process_waits_and_reports_it_once(path: Path) -> None:
    order: list[str] = []
    with hold_lock(path, on_wait=lambda: order.append("nobody was there")):
        thread = waiter(path, order)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_a_waiter_locks_the_current_file_after_the_old_one_was_removed(path: Path) -> None:
    leave = threading.Event()
    with hold_lock(path, remove=True):
        thread = waiter(path, order := [], leave, remove=True)
    while not order:
        time.sleep(0.001)
    assert try_open_locked(path, FLAGS) is None, "a third one finds the file of the second"
    leave.set()
    thread.join(60)
    assert not path.exists()


def test_a_directory_can_be_locked(tmp_path: Path) -> None:
    with hold_lock(tmp_path):
        assert try_open_locked(tmp_path, os.O_RDONLY) is None
        assert list(tmp_path.iterdir()) == []
    descriptor = try_open_locked(tmp_path, os.O_RDONLY)
    assert descriptor is not None
    os.close(descriptor)


def test_killing_the_process_releases_its_lock(path: Path) -> None:
    code = "import os, signal, sys; from pathlib import Path; from mergegate.merge_core.files import hold_lock\n"
    code += "with hold_lock(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    with hold_lock(path, on_wait=lambda: pytest.fail("somebody still holds it")):
        pass


def test_shared_locks_only_exclude_exclusive_locks(path: Path) -> None:
    one, other = (os.open(path, FLAGS) for _ in range(2))
    assert lock_file(one, path, shared=True)
    assert lock_file(other, path, shared=True)
    assert not lock_file(one, path, wait=False)
    fcntl.flock(other, fcntl.LOCK_UN)
    assert lock_file(one, path, wait=False)
    os.close(one)
    os.close(other)


def test_a_lock_on_a_file_that_was_replaced_does_not_count(path: Path) -> None:
    descriptor = os.open(path, FLAGS)
    path.with_name("other").touch()
    path.with_name("other").rename(path)
    assert not lock_file(descriptor, path)
    os.close(descriptor)


def test_a_file_system_without_locks_is_an_error_unless_they_are_not_required(
    path: Path, no_locks: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DiskUnavailable, match=r"does not support locks \(flock\)"), hold_lock(path):
        pass
    with hold_lock(path, required=False):
        assert "does not support locks" in caplog.text


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate directories in which no file can be created, even for root."""
    real_open = os.open

    def open_existing(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not os.path.lexists(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_existing)


@pytest.mark.parametrize("required", [True, False])
def test_a_lock_in_a_read_only_directory_is_a_permission_error(path: Path, read_only: None, required: bool) -> None:
    with pytest.raises(PermissionError), hold_lock(path, required=required):
        pass
    with pytest.raises(PermissionError):
        try_open_locked(path, FLAGS, required=required)

"""File locks: exclusive or shared, and released when the process ends or the file is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mergegate.merge_core.files import hold_lock, lock_file, try_open_locked

FLAGS = os.O_RDWR | os.O_CREAT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system without locks."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)


def test_a_second_process_waits_and_reports_it_once(path: Path) -> None:
    waiting, order = threading.Event(), []

    def second() -> None:
        with hold_lock(path, on_wait=waiting.set):
            order.append("second")

    with hold_lock(path, on_wait=lambda: order.append("nobody was there")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_a_waiter_locks_the_current_file_after_the_old_one_was_removed(path: Path) -> None:
    waiting, inside, leave = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        with hold_lock(path, remove=True, on_wait=waiting.set):
            inside.set()
            leave.wait(60)

    with hold_lock(path, remove=True):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
    assert inside.wait(60)
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
    with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)), hold_lock(path):
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

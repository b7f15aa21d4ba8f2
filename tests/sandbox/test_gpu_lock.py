"""A GPU runs one job at a time per host, and is free again however the job ended."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import HANG_S

from mergegate.tasks.base.sandbox import ProcessOptions, SupervisedProcess
from mergegate.tasks.base.sandbox.gpu_lock import LOCKS, GpuLocks, list_host_gpus, select_gpus

FIRST, SECOND = "GPU-aaaa1111-0000-0000-0000-000000000001", "GPU-bbbb2222-0000-0000-0000-000000000002"
Environment = Callable[[str], dict[str, str]]
HOLDER = """
import os, sys, time
from pathlib import Path
from mergegate.tasks.base.sandbox.gpu_lock import GpuLocks
held = GpuLocks(Path(sys.argv[1])).acquire(os.environ)
print("held", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Write the files in which a driver with two GPUs describes them."""
    for bus, uuid in (("0000:41:00.0", SECOND), ("0000:01:00.0", FIRST)):
        place = tmp_path / "gpus" / bus
        place.mkdir(parents=True)
        (place / "information").write_text(
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 100\nGPU UUID: \t {uuid}\n"
            "Video BIOS: \t 96.00.74.00.01\nBus Type: \t PCIe\nDevice Minor: \t 0\n"
        )
    return tmp_path / "gpus"


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return lambda visible: {"CUDA_VISIBLE_DEVICES": visible, LOCKS: str(tmp_path)}


def is_free(place: Path, uuid: str) -> bool:
    descriptor = os.open(place / f"mergegate-{uuid}.lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def open_files(pid: int) -> set[str]:
    """Return the files that a process has open; it may open and close files in the meantime."""
    seen = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            seen.add(str(file.readlink()))
    return seen


def test_gpus_are_listed_in_bus_order(driver: Path) -> None:
    assert list_host_gpus(driver) == (FIRST, SECOND)
    assert list_host_gpus(driver / "none") == ()


@pytest.mark.parametrize(
    ("visible", "held"),
    [
        *(("0", [FIRST]), ("1", [SECOND]), ("1,0", [FIRST, SECOND]), (SECOND, [SECOND]), ("GPU-bbbb", [SECOND])),
        *(("MIG-1234", [FIRST, SECOND]), ("7", [FIRST, SECOND]), ("", [])),
    ],
)
def test_a_process_locks_the_gpus_that_it_may_see(visible: str, held: list[str]) -> None:
    assert list(select_gpus((FIRST, SECOND), [name for name in visible.split(",") if name])) == held


@given(
    st.lists(st.sampled_from(["0", "1", "2", "9", "GPU-a", "GPU-b", "MIG-1", "x"])), st.permutations(["a", "b", "c"])
)
def test_all_processes_lock_gpus_in_one_order(visible: list[str], host: list[str]) -> None:
    held = select_gpus([f"GPU-{name}" for name in host], visible)
    assert list(held) == sorted(set(held))


def test_a_second_job_waits_until_the_first_is_done(
    tmp_path: Path, driver: Path, environment: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = GpuLocks(driver), GpuLocks(driver)
    held = one.acquire(environment("0,1"))
    came = threading.Event()

    def wait() -> None:
        other.acquire(environment("1")).release()
        came.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    deadline = time.monotonic() + HANG_S
    while "waiting until it ends" not in caplog.text and not came.wait(0.01):
        assert time.monotonic() < deadline
    assert not came.is_set()
    held.release()
    held.release()  # A second release has no effect.
    assert came.wait(HANG_S)
    waiting.join(HANG_S)
    GpuLocks(driver).acquire(environment("0")).release()
    assert {path.name for path in tmp_path.glob("*.lock")} == {f"mergegate-{FIRST}.lock", f"mergegate-{SECOND}.lock"}


def test_leases_of_one_process_share_the_locks(tmp_path: Path, driver: Path, environment: Environment) -> None:
    locks = GpuLocks(driver)
    one, other = locks.acquire(environment("0")), locks.acquire(environment("0"))
    GpuLocks(driver).acquire(environment("1")).release()  # Other GPUs stay free.
    one.release()
    assert not is_free(tmp_path, FIRST)
    other.release()
    assert is_free(tmp_path, FIRST)


@pytest.mark.story
def test_a_killed_job_releases_its_gpus(tmp_path: Path, driver: Path, environment: Environment) -> None:
    command, own = [sys.executable, "-c", HOLDER, str(driver)], {**os.environ, **environment("0")}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, env=own)
    assert job.stdout.readline() == b"held\n"
    assert not is_free(tmp_path, FIRST)
    job.send_signal(signal.SIGKILL)
    job.wait(HANG_S)
    job.stdout.close()
    assert is_free(tmp_path, FIRST)


def test_a_child_process_holds_the_lock_until_it_ends(tmp_path: Path, driver: Path, environment: Environment) -> None:
    held = GpuLocks(driver).acquire(environment("0"))
    with (tmp_path / "log").open("wb") as output:
        options = ProcessOptions("test", inherited=held.descriptors)
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        process = SupervisedProcess(command, dict(os.environ), output, options)
    held.release()
    assert not is_free(tmp_path, FIRST)
    assert not any(name.endswith(".lock") for name in open_files(process.pid))
    process.end()
    assert is_free(tmp_path, FIRST)


def test_a_link_in_place_of_a_lock_file_is_refused(tmp_path: Path, driver: Path, environment: Environment) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f"mergegate-{FIRST}.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        GpuLocks(driver).acquire(environment("0"))
    assert (tmp_path / "victim").read_text() == "precious"

"""A supervised process and its children end together, and the supervisor reports how and why."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

import pytest

from mergegate.tasks.sandbox import NotStarted, ProcessEnd, ProcessOptions, SupervisedProcess

Start = Callable[..., SupervisedProcess]


@pytest.fixture
def output() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


@pytest.fixture
def start(output: IO[bytes]) -> Iterator[Start]:
    """Run a Python script under supervision."""
    started = []

    def run(script: str, *arguments: str, **options: Any) -> SupervisedProcess:
        started.append(
            SupervisedProcess(
                [sys.executable, "-c", script, *arguments], os.environ, output, ProcessOptions("test", **options)
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.end()


def test_a_process_that_exits_reports_its_code_and_leaves_no_files(start: Start, output: IO[bytes]) -> None:
    script = "import tempfile; print('bye', flush=True); tempfile.mkstemp(); raise SystemExit(7)"
    process = start(script)
    assert process.ends(within=60)
    assert process.end() == ProcessEnd(returncode=7, reason="exited") == process.end()
    output.seek(0)
    assert output.read() == b"bye\n"
    assert not process.scratch.exists()


def test_a_process_that_ignores_signals_is_killed_without_grace(start: Start) -> None:
    here, there = Pipe()
    script = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "os.write(int(sys.argv[1]), b'0'); time.sleep(600)"
    )
    process = start(script, str(there.fileno()), pass_fds=(there.fileno(),))
    there.close()
    assert os.read(here.fileno(), 1) == b"0"
    assert process.alive
    assert process.end() == ProcessEnd(returncode=-signal.SIGKILL, reason="requested")
    assert not process.alive


def test_the_end_of_a_process_closes_its_connection(start: Start) -> None:
    here, there = Pipe()
    process = start("import time; time.sleep(600)", pass_fds=(there.fileno(),))
    there.close()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EOFError):  # The supervisor does not hold the other end open.
        here.recv()
    assert process.end().returncode == -signal.SIGKILL


def test_a_process_ends_at_its_limit(start: Start) -> None:
    process = start("import time; time.sleep(600)", limit=0.2)
    assert process.ends(within=60)
    assert process.end().reason == "limit"


@pytest.mark.parametrize("mapped", ["mmap.mmap(segment, 1)", "None"], ids=["mapped", "opened, and not mapped yet"])
def test_shared_memory_of_the_process_is_removed(start: Start, mapped: str) -> None:
    here, there = Pipe()
    place = Path(f"/dev/shm/mergegate-test-{os.getpid()}-{len(mapped)}")
    script = f"""import mmap, os, sys, time
segment = os.open({str(place)!r}, os.O_CREAT | os.O_RDWR)
os.ftruncate(segment, 1)
held = {mapped}
os.write(int(sys.argv[1]), b"0")
time.sleep(600)"""
    process = start(script, str(there.fileno()), pass_fds=(there.fileno(),))
    os.read(here.fileno(), 1)
    assert place.exists()
    process.end()
    assert not place.exists()


def test_a_missing_command_is_reported(output: IO[bytes]) -> None:
    with pytest.raises(NotStarted, match="/nowhere/server: No such file"):
        SupervisedProcess(["/nowhere/server"], {}, output, ProcessOptions("test"))

"""A supervised process and its children end together; libraries without bytecode are compiled by one import."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

import pytest
from patience import HANG_S

from mergegate.tasks.base.sandbox import NotStarted, ProcessEnd, ProcessOptions, SupervisedProcess, compile_imports

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
        command = [sys.executable, "-c", script, *arguments]
        started.append(SupervisedProcess(command, os.environ, output, ProcessOptions("test", **options)))
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


@pytest.mark.story
def test_a_process_ends_at_its_limit(start: Start) -> None:
    process = start("import time; time.sleep(600)", limit=0.2)
    assert process.ends(within=60)
    assert process.end().reason == "limit"


@pytest.mark.parametrize(
    "mapped", ["mmap.mmap(segment, 1)", pytest.param("None", marks=pytest.mark.story)], ids=["mapped", "only opened"]
)
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


PROJECT = Path(__file__).resolve().parents[2]

IMPORTS = "import early, package.last"


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a library directory; each import of ``package.last`` adds a line to its file ``imported``."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "package").mkdir()
    (tmp_path / "early.py").touch()
    (tmp_path / "package" / "__init__.py").touch()
    said = f"open({str(tmp_path / 'imported')!r}, 'a').write('once\\n')"
    (tmp_path / "package" / "last.py").write_text(said)
    return tmp_path


def compile_them(libraries: Path, python: str = sys.executable, imports: str = IMPORTS) -> None:
    seen = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    compile_imports(python, imports, libraries / "package" / "last.py", seen | {"PYTHONPATH": str(libraries)})


def compiled(libraries: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in libraries.rglob("*.pyc")}


def imported(libraries: Path) -> int:
    place = libraries / "imported"
    return len(place.read_text().splitlines()) if place.exists() else 0


def test_all_imports_are_compiled_once(libraries: Path) -> None:
    compile_them(libraries)
    assert compiled(libraries) == {"early", "__init__", "last"}
    compile_them(libraries)
    assert imported(libraries) == 1


ASKS = """
import sys
from pathlib import Path
from mergegate.tasks.base.sandbox import compile_imports
print("asks", flush=True)
compile_imports(sys.executable, sys.argv[1], Path(sys.argv[2]), {"PYTHONPATH": sys.argv[3]})
"""


def asking(libraries: Path) -> list[str]:
    return [sys.executable, "-c", ASKS, IMPORTS, str(libraries / "package" / "last.py"), str(libraries)]


@pytest.mark.story
def test_only_one_of_two_simultaneous_runs_compiles(libraries: Path) -> None:
    os.mkfifo(libraries / "gate")
    (libraries / "early.py").write_text(
        f"with open({str(libraries / 'imported')!r}, 'a') as said: said.write('once\\n'); first = said.tell() == 5\n"
        f"if first: open({str(libraries / 'gate')!r}).read()\n"
    )
    (libraries / "package" / "last.py").write_text("")
    with ThreadPoolExecutor() as beside:
        first = beside.submit(compile_them, libraries)
        with (libraries / "gate").open("w"):  # The first run is in the middle of its imports.
            command = asking(libraries)
            second = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(PROJECT)})
            assert second.stdout.readline() == b"asks\n"
        first.result()
    second.communicate(timeout=HANG_S)
    assert second.returncode == 0
    assert imported(libraries) == 1


def test_nothing_is_compiled_if_python_does_not_write_bytecode(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    compile_them(libraries)
    assert (compiled(libraries), imported(libraries)) == (set(), 0)


@pytest.mark.parametrize(("python", "imports"), [("no such interpreter", IMPORTS), (sys.executable, IMPORTS)])
def test_a_failed_import_is_ignored(libraries: Path, python: str, imports: str) -> None:
    if (python, imports) == (sys.executable, IMPORTS):
        (libraries / "package" / "last.py").unlink()
    compile_them(libraries, python, imports)
    assert compiled(libraries) == set()


@pytest.mark.story
def test_a_killed_run_leaves_no_compiling_process(libraries: Path) -> None:
    os.mkfifo(libraries / "gate")
    (libraries / "early.py").write_text(
        f"import os; open({str(libraries / 'gate')!r}, 'w').write(f'{{os.getpid()}}')\n"
    )
    (libraries / "package" / "last.py").write_text("import time; time.sleep(1000)")
    command = asking(libraries)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**environment, "PYTHONPATH": str(PROJECT)})
    pid = int((libraries / "gate").read_text())
    descriptor = os.pidfd_open(pid)
    run.kill()
    run.wait()
    assert select.select([descriptor], [], [], HANG_S)[0], "the process has not ended"
    os.close(descriptor)

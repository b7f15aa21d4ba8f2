"""Libraries without bytecode are compiled once, by importing them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import HANG_S

from mergegate.tasks.sandbox import compile_imports

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
from mergegate.tasks.sandbox import compile_imports
print("asks", flush=True)
compile_imports(sys.executable, sys.argv[1], Path(sys.argv[2]), {"PYTHONPATH": sys.argv[3]})
"""


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
            last = str(libraries / "package" / "last.py")
            command = [sys.executable, "-c", ASKS, IMPORTS, last, str(libraries)]
            second = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(PROJECT)})
            assert second.stdout is not None
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
    assert compiled(libraries) == set()
    assert imported(libraries) == 0


def test_a_missing_library_is_not_imported(libraries: Path) -> None:
    (libraries / "package" / "last.py").unlink()
    compile_them(libraries)
    assert compiled(libraries) == set()


@pytest.mark.parametrize(
    ("python", "imports"), [("no such interpreter", IMPORTS), (sys.executable, "raise SystemExit(3)")]
)
def test_a_failed_import_is_ignored(libraries: Path, python: str, imports: str) -> None:
    compile_them(libraries, python, imports)
    assert compiled(libraries) == set()


def test_a_killed_run_leaves_no_compiling_process(libraries: Path) -> None:
    os.mkfifo(libraries / "gate")
    (libraries / "early.py").write_text(
        f"import os; open({str(libraries / 'gate')!r}, 'w').write(f'{{os.getpid()}}')\n"
    )
    (libraries / "package" / "last.py").write_text("import time; time.sleep(1000)")
    last = str(libraries / "package" / "last.py")
    command = [sys.executable, "-c", ASKS, IMPORTS, last, str(libraries)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**environment, "PYTHONPATH": str(PROJECT)})
    pid = int((libraries / "gate").read_text())
    descriptor = os.pidfd_open(pid)
    run.kill()
    run.wait()
    assert select.select([descriptor], [], [], HANG_S)[0], "the process has not ended"
    os.close(descriptor)

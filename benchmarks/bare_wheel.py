"""Test the wheel alone: build it from the files that Git tracks, install it without a clone, and run its commands.

::

    .venv/bin/python benchmarks/bare_wheel.py                    # about two minutes; the table as Markdown
    .venv/bin/python benchmarks/bare_wheel.py --with uv pipx     # real installs, with downloads: make bench-install

The new environment contains the dependencies in ``pyproject.toml`` and the wheel, which pip installs. The dependencies
are links to the packages of this interpreter, because installing them again takes many minutes and proves nothing.
Only the wheel makes this project importable there. The script then runs the commands that a user tries in the first
hour, from another directory and with a separate home. If a command ends unexpectedly, the script prints its output and
exits with code 1.

With ``--with``, each tool installs the wheel and all its dependencies as a user would: ``uv tool install`` and ``pipx
install``. The script then releases the demo and verifies the release. The tools use the indexes that pip is configured
for.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
LINKED_NOT = ("__editable__", "mergegate", "__pycache__")
# Each command with its required exit code. The last three of the demo are a release, a refusal and its proof.
COMMANDS = (
    (0, "mergegate", "--help"),
    (0, "mergegate", "demo", "demo"),
    (0, "mergegate", "schema"),
    (0, "mergegate", "schema", "recipe"),
    (0, "mergegate", "check", "demo/profiles/demo.yaml"),
    (0, "mergegate", "plan", "demo/profiles/demo.yaml"),
    (3, "mergegate", "check", "demo/profiles/demo-forbidden.yaml"),
    (0, "mergegate", "methods"),
)
FIRST_RELEASE = (
    (0, "mergegate", "demo", "demo"),
    (0, "mergegate", "verify", "demo/releases/demo/latest"),
)
TOOLS = ("uv", "pipx")


@dataclass(frozen=True)
class Used:
    """One command and how it ended."""

    command: str
    expected: int
    code: int
    seconds: float
    said: str

    @property
    def row(self) -> str:
        """The command as a row of the table."""
        return f"| `{self.command}` | {self.code} | {self.seconds:.0f} s |"


def build(to: Path) -> Path:
    """Build the wheel from a copy of the files that Git tracks, so that no stray file gets in."""
    listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True)
    source = to / "source"
    for file in listed.stdout.splitlines():
        if (PROJECT / file).exists():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PROJECT / file, source / file, follow_symlinks=False)  # mergegate/ links to the layers
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "-w", str(to), str(source)], check=True)
    (built,) = to.glob("mergegate-*.whl")
    shutil.rmtree(source)
    return built


def bare_environment(place: Path, wheel: Path) -> Path:
    """Create an environment with the wheel and its dependencies, and return its directory of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = place / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    packages = Path(found.stdout.strip())
    for there in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not there.name.startswith(LINKED_NOT) and not (packages / there.name).exists():
            (packages / there.name).symlink_to(there)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    return python.parent


def pip_settings() -> dict[str, str]:
    """Return the index, extra indexes and link directories that pip is configured for, by the names that uv reads."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
    found = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if name := names.get(key.rpartition(".")[2]):
            found[name] = ast.literal_eval(value)
    return {**found, **{name: os.environ[name] for name in found if name in os.environ}}


def install_with(tool: str, place: Path, wheel: Path) -> Path:
    """Install the wheel and its dependencies with ``uv tool`` or ``pipx``, and return the directory of programs."""
    programs = place / "bin"
    constraint = place / "constraint.txt"
    place.mkdir()
    constraint.write_text(f"torch=={version('torch')}\n")  # the build that this machine uses
    if tool == "uv":
        settings = {**pip_settings(), "UV_TOOL_DIR": str(place / "tools"), "UV_TOOL_BIN_DIR": str(programs)}
        command = [str(PROJECT / ".uv/bin/uv"), "tool", "install", "--system-certs", "--python", sys.executable]
        command += ["--index-strategy", "unsafe-best-match", "--overrides", str(constraint), str(wheel)]
    else:
        subprocess.run([sys.executable, "-m", "venv", str(place / "pipx")], check=True)
        python = str(place / "pipx/bin/python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "pipx"], check=True)
        settings = {"PIPX_HOME": str(place / "tools"), "PIPX_BIN_DIR": str(programs), "USE_EMOJI": "0"}
        settings["PIP_CONSTRAINT"] = str(constraint)
        command = [python, "-m", "pipx", "install", "--python", sys.executable, str(wheel)]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(command, env={**clean, **settings}, check=True, stdin=subprocess.DEVNULL)
    return programs


def use(programs: Path, place: Path, commands: Sequence[tuple[int | str, ...]] = COMMANDS) -> Iterator[Used]:
    """Run each command in ``place`` as a user who has only the wheel."""
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ}
    home = place / "home"
    home.mkdir(parents=True, exist_ok=True)
    environment = {**kept, "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    for expected, *command in commands:
        began = time.monotonic()
        done = subprocess.run(
            [str(programs / str(command[0])), *map(str, command[1:])],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        yield Used(" ".join(map(str, command)), int(expected), done.returncode, time.monotonic() - began, said)


def imported_from(programs: Path, place: Path) -> set[Path]:
    """Return the directories from which that environment imports the layers."""
    script = "import mergegate.flows as a, mergegate.tasks as b, mergegate.merge_core as c\n"
    script += "print(a.__file__, b.__file__, c.__file__, sep='\\n')"
    done = subprocess.run([programs / "python", "-c", script], cwd=place, capture_output=True, text=True, check=True)
    return {Path(line).parents[2] for line in done.stdout.split()}


def main() -> None:
    """Build and install the wheel, run the commands and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--with", dest="tools", nargs="+", choices=TOOLS, default=(), help="Tools for real installs.")
    tools = parser.parse_args().tools
    with tempfile.TemporaryDirectory(prefix="bare-wheel-") as scratch:
        root = Path(scratch)
        wheel = build(root)
        print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
        wrong = []
        for tool in tools or ("links",):
            began = time.monotonic()
            environment = root / tool
            programs = install_with(tool, environment, wheel) if tools else bare_environment(environment, wheel)
            place = root / f"elsewhere-{tool}"
            place.mkdir()
            if not tools:
                (imported,) = imported_from(programs, place)
                if not imported.is_relative_to(root):
                    raise SystemExit(f"imported from {imported}, not from the wheel")
            print(f"\ninstalled with {tool} in {time.monotonic() - began:.0f} s\n", flush=True)
            print("| command | exit code | time |\n| --- | ---: | ---: |")
            for used in use(programs, place, FIRST_RELEASE if tools else COMMANDS):
                print(used.row, flush=True)
                wrong += [used] if used.code != used.expected or "Traceback" in used.said else []
        for used in wrong:
            print(f"\n{used.command}: expected {used.expected}\n{used.said}", file=sys.stderr)
        if wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    main()

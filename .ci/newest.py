"""Test the newest version of each dependency, to find breaking changes before a user does. For a scheduled CI job.

::

    make newest                                               # each direct dependency alone, then all together
    make newest NEWEST="--only prefect --tests tests/flows"   # one dependency, fewer tests

For each dependency, the script creates an environment that sees ``.venv`` and has one package newer than the pin in
``constraints.txt``, with the dependencies of that version. It then runs the fast tests. The table lists packages that
the index does not have or that cannot be installed. The script prints the table, writes it to ``newest.md``, and exits
with code 1 if a newer version fails. It changes no bounds or pins; a maintainer does that after reading the table.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAST = ("-m", "not slow and not gpu and not peer and not serve and not ray")
# Some builds of torch work only on some machines.
LEFT_OUT = {"torch", "mergegate"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LIMIT_S = 3 * 3600


@dataclass(frozen=True)
class Tried:
    """One package, or all of them, in the newest version."""

    name: str
    pinned: str
    newest: str
    outcome: str  # passes, fails, cannot be installed
    why: str = ""

    def row(self) -> str:
        """The package as a row of the table."""
        return f"| {self.name} | {self.pinned} | {self.newest} | {self.outcome} | {self.why.replace('|', '/')} |"


def normal(name: str) -> str:
    """Return a name in the normal form of package indexes (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_dependencies(pyproject: Mapping[str, object]) -> list[str]:
    """Return the names of the direct dependencies, including those of extras, in order."""
    project = pyproject["project"]
    assert isinstance(project, Mapping)
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = [normal(found[0]) for one in asked if (found := _NAME.match(one))]
    return [name for name in dict.fromkeys(names) if name not in LEFT_OUT]


def pins(constraints: str) -> dict[str, str]:
    """Return the version of each pinned package."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}


def newest_version(said: str) -> str:
    """Return the version from the output of ``pip index versions``, such as ``prefect (3.9.1)``."""
    found = re.search(r"^\S+ \(([^)]+)\)", said, re.MULTILINE)
    return found[1] if found else ""


def conflict(said: str) -> str:
    """Return one line of pip's output that explains why an installation failed."""
    lines = [line.strip() for line in said.splitlines()]
    for line in lines:
        if " depends on " in line or "No matching distribution" in line:
            return line.removeprefix("ERROR: ")
    return next((line for line in reversed(lines) if line), "no reason was given")


def broken_tests(said: str) -> str:
    """Return the first failure in pytest's output, and the number of the others."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if not failed:
        return next((line for line in reversed(said.splitlines()) if line.strip()), "no test ran")
    return failed[0] + (f" and {len(failed) - 1} more" if len(failed) > 1 else "")


def loosened(constraints: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return the pins, with the versions in ``wanted`` replaced."""
    return "".join(f"{name}=={version}\n" for name, version in {**constraints, **wanted}.items())


def environment_beside(place: Path, base: Path) -> Path:
    """Create an environment that sees the packages of ``base`` and can have newer ones. Return its Python."""
    venv.create(place, with_pip=True, clear=True)
    python = place / "bin" / "python"
    library = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
    seen = sysconfig.get_path("purelib", vars={"base": str(base), "platbase": str(base)})
    Path(library, "beside.pth").write_text(f"import site; site.addsitedir({seen!r})\n")
    return python


def run(command: Sequence[str | Path]) -> tuple[int, str]:
    """Return the exit code and the output of a command."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def try_out(
    name: str, wanted: Mapping[str, str], pinned: Mapping[str, str], place: Path, tests: Sequence[str]
) -> Tried:
    """Install ``wanted`` in an environment that sees the current packages, and run the tests."""
    before = ", ".join(pinned.get(one, "-") for one in wanted) if len(wanted) == 1 else ""
    after = ", ".join(wanted.values()) if len(wanted) == 1 else f"{len(wanted)} packages"
    python = environment_beside(place / name, ROOT / ".venv")
    constraints = place / f"{name}.txt"
    constraints.write_text(loosened(pinned, wanted))
    newer = [f"{one}=={version}" for one, version in wanted.items()]
    code, said = run([python, "-m", "pip", "install", "--constraint", constraints, *newer])
    if code:
        return Tried(name, before, after, "cannot be installed", conflict(said))
    # Use a new cache, because results in the old one come from other versions.
    code, said = run([python, "-m", "pytest", "-q", "-o", f"cache_dir={place / name / 'cache'}", *tests])
    return Tried(name, before, after, "fails" if code else "passes", broken_tests(said) if code else "")


def table(tried: Iterable[Tried]) -> str:
    """Return the results as a Markdown table."""
    head = ["| package | pinned | newest | outcome | reason |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *(one.row() for one in tried)]) + "\n"


def main() -> int:
    """Test the newer versions. Return 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", type=normal, help="Packages to test. Default: all direct dependencies.")
    parser.add_argument("--tests", nargs="*", default=FAST, help="Arguments for pytest. Default: the fast tests.")
    arguments = parser.parse_args()
    pinned = pins((ROOT / "constraints.txt").read_text())
    names = arguments.only or direct_dependencies(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    newer: dict[str, str] = {}
    for name in names:
        newest = newest_version(run([sys.executable, "-m", "pip", "index", "versions", name])[1])
        if newest and newest != pinned.get(name):
            newer[name] = newest
    place = ROOT / ".venv-newest"
    tried = []
    for name, newest in newer.items():
        tried.append(try_out(name, {name: newest}, pinned, place, arguments.tests))
        print(tried[-1].row(), flush=True)
    installable = {one.name: newer[one.name] for one in tried if one.outcome != "cannot be installed"}
    if len(installable) > 1:
        tried.append(try_out("all-of-them", installable, pinned, place, arguments.tests))
    (ROOT / "newest.md").write_text(table(tried))
    print(table(tried) if tried else "all dependencies are up to date")
    return int(any(one.outcome != "passes" for one in tried))


if __name__ == "__main__":
    sys.exit(main())

"""Test the newest version of each dependency. For a scheduled CI job.

::

    make newest                                               # every direct dependency, one at a time, then together
    make newest NEWEST="--only prefect --tests tests/flows"   # one of them, and fewer tests

For each package, the script creates an environment that sees ``.venv``, installs the newest version of the package
with its dependencies, and runs the fast tests. It writes a table to standard output and to ``newest.md``, including
packages that could not be installed. The exit code is 1 if a newer version does not pass. The script does not change
bounds or pins. A maintainer raises them.
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
FAST = ("-m", "not slow and not gpu and not peer and not serve and not ray and not variants")
# Some builds of torch need other hardware. vLLM has its own environment.
LEFT_OUT = {"torch", "mergegate"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LIMIT_S = 3 * 3600


@dataclass(frozen=True)
class Tried:
    """Result of the test of one package, or of all packages together."""

    name: str
    pinned: str
    newest: str
    outcome: str  # passes, fails, cannot be installed
    why: str = ""

    def row(self) -> str:
        """Return the row of the table."""
        return f"| {self.name} | {self.pinned} | {self.newest} | {self.outcome} | {self.why.replace('|', '/')} |"


def normal(name: str) -> str:
    """Return a package name in the normal form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_dependencies(pyproject: Mapping[str, object]) -> list[str]:
    """Return the names of the direct dependencies, including extras, in the order of the file."""
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
    """Return the newest version in the output of ``pip index versions``, or an empty string."""
    found = re.search(r"^\S+ \(([^)]+)\)", said, re.MULTILINE)
    return found[1] if found else ""


def conflict(said: str) -> str:
    """Return the reason why pip could not install a package, in one line."""
    lines = [line.strip() for line in said.splitlines()]
    for line in lines:
        if " depends on " in line or "No matching distribution" in line:
            return line.removeprefix("ERROR: ")
    return next((line for line in reversed(lines) if line), "pip gave no reason")


def broken_tests(said: str) -> str:
    """Return the first failure in pytest's output, and the number of the others."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if not failed:
        return next((line for line in reversed(said.splitlines()) if line.strip()), "no test ran")
    return failed[0] + (f" and {len(failed) - 1} more" if len(failed) > 1 else "")


def loosened(constraints: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return the constraints, with the versions of ``wanted`` instead of the pinned ones."""
    return "".join(f"{name}=={version}\n" for name, version in {**constraints, **wanted}.items())


def environment_beside(place: Path, base: Path) -> Path:
    """Create an environment that sees the packages of ``base`` and may hold newer ones. Return its Python."""
    venv.create(place, with_pip=True, clear=True)
    python = place / "bin" / "python"
    library = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
    seen = sysconfig.get_path("purelib", vars={"base": str(base), "platbase": str(base)})
    Path(library, "beside.pth").write_text(f"import site; site.addsitedir({seen!r})\n")
    return python


def run(command: Sequence[str | Path]) -> tuple[int, str]:
    """Run a command, and return its exit code and output."""
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
    """Install ``wanted`` into a new environment, and run the tests."""
    before = ", ".join(pinned.get(one, "-") for one in wanted) if len(wanted) == 1 else ""
    after = ", ".join(wanted.values()) if len(wanted) == 1 else f"{len(wanted)} packages"
    python = environment_beside(place / name, ROOT / ".venv")
    constraints = place / f"{name}.txt"
    constraints.write_text(loosened(pinned, wanted))
    newer = [f"{one}=={version}" for one, version in wanted.items()]
    code, said = run([python, "-m", "pip", "install", "--constraint", constraints, *newer])
    if code:
        return Tried(name, before, after, "cannot be installed", conflict(said))
    # The test cache contains results of other versions, so this environment has its own.
    code, said = run([python, "-m", "pytest", "-q", "-o", f"cache_dir={place / name / 'cache'}", *tests])
    return Tried(name, before, after, "fails" if code else "passes", broken_tests(said) if code else "")


def table(tried: Iterable[Tried]) -> str:
    """Return the results as a Markdown table."""
    head = ["| package | pinned | newest | outcome | failed test or reason |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *(one.row() for one in tried)]) + "\n"


def main() -> int:
    """Test the packages, and return 1 if a newer version does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", type=normal, help="Names of packages. Default: all.")
    parser.add_argument("--tests", nargs="*", default=FAST, help="Arguments of pytest. Default: the fast tests.")
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
    print(table(tried) if tried else "All packages have their newest version.")
    return int(any(one.outcome != "passes" for one in tried))


if __name__ == "__main__":
    sys.exit(main())

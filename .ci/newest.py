"""Test the newest release of each dependency, and say which release breaks what. For a scheduled CI job.

::

    make newest                                               # each direct dependency alone, then everything together
    make newest NEWEST="--only prefect --tests tests/flows"   # one of them, and fewer tests

For each package, the script creates an environment that sees ``.venv``, installs the newest release and only those
other packages that the release needs, and runs the fast tests. The last row upgrades everything within the bounds of
``pyproject.toml``. If it works, ``newest-constraints.txt`` contains the versions for ``constraints.txt``.

The table goes to standard output and to ``newest.md``. A release that ``pyproject.toml`` excludes is tested too, to
find out whether the bound can go. Pins of other environments are only listed.

Exit codes: 0 if every release within the bounds works, 1 if one breaks tests, 2 if none does but one could not be
installed. The script does not change bounds or pins.
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

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FAST = ("-m", "not story and not proof and not gpu and not peer and not serve and not ray and not variants")
TOGETHER = "everything"
_NOT_TRIED = {
    "torch": "only `make` chooses a build for this machine: raise the pin, delete .venv, run `make test`",
    "ray": "has its own environment: raise the pin, run `make test-ray`",
    "prefect-ray": "has its own environment: raise the pin, run `make test-ray`",
}
_LIMIT_S = 3 * 3600

WORKS = "works"
EXCLUDED = "works, but another package excludes it"
BREAKS = "**breaks**"
NOT_INSTALLED = "cannot be installed"
NOT_TRIED = "not tried"
STILL_EXCLUDED = "breaks, as pyproject.toml says"
BOUND_CAN_GO = "works: the bound can go"


@dataclass(frozen=True)
class Result:
    """Result of one release, or of all releases together.

    Attributes:
        name: Normal name of the package.
        pinned: Version in ``constraints.txt``, or in the file that pins the package.
        newest: Newest release.
        outcome: One of the constants above.
        reason: First failed test, conflict, or what else was installed.
    """

    name: str
    pinned: str
    newest: str
    outcome: str
    reason: str = ""

    def row(self) -> str:
        """Return the row of the table."""
        return f"| {self.name} | {self.pinned} | {self.newest} | {self.outcome} | {self.reason.replace('|', '/')} |"


def direct_dependencies(pyproject: Mapping[str, object]) -> dict[str, Requirement]:
    """Return the requirement of each direct dependency, with those of all extras, in the order of the file."""
    project = pyproject["project"]
    assert isinstance(project, Mapping)
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    direct: dict[str, Requirement] = {}
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        merged = direct.setdefault(canonicalize_name(requirement.name), requirement)
        merged.specifier &= requirement.specifier
        merged.extras |= requirement.extras
    del direct["mergegate"]
    return direct


def pins(text: str) -> dict[str, str]:
    """Return the version of each package that a Makefile or a file of constraints pins."""
    lines = "\n".join(line.partition("#")[0] for line in text.splitlines())
    found = re.findall(r"([A-Za-z0-9][\w.-]*)(?:\[[\w,-]*\])?==(\d[\w.!+-]*)", lines)
    return {canonicalize_name(name): version for name, version in found}


def newest_version(output: str) -> str:
    """Return the newest version in the output of ``pip index versions``, or an empty string."""
    found = re.search(r"^\S+ \(([^)]+)\)", output, re.MULTILINE)
    return found[1] if found else ""


def conflict(output: str) -> str:
    """Return the reason why pip could not install a package, in one line."""
    lines = [line.strip() for line in output.splitlines()]
    for line in lines:
        if " depends on " in line or "No matching distribution" in line:
            return line.removeprefix("ERROR: ")
    return next((line for line in reversed(lines) if line), "pip gave no reason")


def broken_bounds(output: str) -> list[str]:
    """Return the requirements of installed packages that the new release does not meet, as pip lists them."""
    return re.findall(r"^((?!mergegate )\S+ \S+ requires .*), but you have .* incompatible\.$", output, re.MULTILINE)


def also_installed(output: str, name: str) -> list[str]:
    """Return what pip installed in addition to a package, as ``name-version``."""
    found = re.search(r"^Successfully installed (.*)$", output, re.MULTILINE)
    packages = found[1].split() if found else []
    return [package for package in packages if canonicalize_name(package.rpartition("-")[0]) != name]


def broken_tests(output: str) -> str:
    """Return the first failure in pytest's output, and the number of the others."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if not failed:
        return next((line for line in reversed(output.splitlines()) if line.strip()), "no test ran")
    return failed[0] + (f" and {len(failed) - 1} more" if len(failed) > 1 else "")


def environment_beside(directory: Path, base: Path) -> Path:
    """Create an environment that sees the packages of ``base`` and may hold newer ones. Return its Python."""
    venv.create(directory, with_pip=True, clear=True)
    library = sysconfig.get_path("purelib", vars={"base": str(directory), "platbase": str(directory)})
    visible = sysconfig.get_path("purelib", vars={"base": str(base), "platbase": str(base)})
    Path(library, "beside.pth").write_text(f"import site; site.addsitedir({visible!r})\n")
    return directory / "bin" / "python"


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


def install_and_test(name: str, requirements: Sequence[str], tests: Sequence[str], directory: Path) -> tuple[str, str]:
    """Install packages into a new environment next to ``.venv``, and run the tests. Return outcome and reason."""
    python = environment_beside(directory / name, ROOT / ".venv")
    code, output = run([python, "-m", "pip", "install", "--constraint", directory / "torch.txt", *requirements])
    if code:
        return NOT_INSTALLED, conflict(output)
    moved = also_installed(output, name)
    unmet = broken_bounds(output)
    # The test cache contains results of other versions, so this environment has its own.
    code, output = run([python, "-m", "pytest", "-q", "-o", f"cache_dir={directory / name / 'cache'}", *tests])
    if code:
        return BREAKS, "; ".join([broken_tests(output), *unmet])
    if name == TOGETHER:
        exclude = [f"--exclude={package}" for package in ("mergegate", "pip", "setuptools")]
        versions = run([python, "-m", "pip", "list", "--format", "freeze", *exclude])[1]
        (ROOT / "newest-constraints.txt").write_text(versions)
        return WORKS, f"{len(moved)} packages moved, listed in newest-constraints.txt"
    return EXCLUDED if unmet else WORKS, "; ".join([f"with {' '.join(moved)}"] * bool(moved) + unmet)


def within_bounds(result: Result, bounds: SpecifierSet) -> Result:
    """Return the result of a single release in view of the bounds in ``pyproject.toml``."""
    if bounds.contains(result.newest, prereleases=True) or result.outcome in (NOT_INSTALLED, EXCLUDED):
        return result
    outcome = BOUND_CAN_GO if result.outcome == WORKS else STILL_EXCLUDED
    reason = f"{bounds}: {result.reason}" if result.reason else str(bounds)
    return Result(result.name, result.pinned, result.newest, outcome, reason)


def table(results: Iterable[Result]) -> str:
    """Return the results as a Markdown table."""
    head = [
        "| package | pinned | newest | result | first failed test, conflict or note |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *(result.row() for result in results)]) + "\n"


def exit_code(results: Iterable[Result]) -> int:
    """Return 1 if a release within the bounds breaks tests, 2 if one could not be installed, otherwise 0."""
    outcomes = {result.outcome for result in results}
    return 1 if BREAKS in outcomes else 2 if NOT_INSTALLED in outcomes else 0


def main() -> int:
    """Test the packages, write the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", type=canonicalize_name, help="Names of packages. Default: all.")
    parser.add_argument("--tests", nargs="*", default=FAST, help="Arguments of pytest. Default: the fast tests.")
    arguments = parser.parse_args()
    pinned = pins((ROOT / "constraints.txt").read_text())
    direct = direct_dependencies(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    elsewhere = pins((ROOT / "Makefile").read_text() + (ROOT / "tests/tokenizer-packages.txt").read_text())
    for name in set(arguments.only or ()) - {*pinned, *elsewhere}:
        parser.error(f"unknown package {name!r} in --only. Name a package of constraints.txt or of the Makefile")
    directory = ROOT / ".venv-newest"
    directory.mkdir(exist_ok=True)
    (directory / "torch.txt").write_text(f"torch=={pinned['torch']}\n")
    results: list[Result] = []
    for name in arguments.only or [*direct, *elsewhere]:
        before = pinned.get(name) or elsewhere[name]
        newest = newest_version(run([sys.executable, "-m", "pip", "index", "versions", name])[1])
        if newest == before:
            continue
        if not newest:
            results.append(
                Result(name, before, "-", NOT_INSTALLED, "the package index offers no release for this Python")
            )
        elif name in _NOT_TRIED or name not in pinned:
            reason = _NOT_TRIED.get(name, "has its own environment: raise the pin in the Makefile, run its tests")
            results.append(Result(name, before, newest, NOT_TRIED, reason))
        else:
            tried = install_and_test(name, [f"{name}=={newest}"], arguments.tests, directory)
            bounds = direct[name].specifier if name in direct else SpecifierSet()
            results.append(within_bounds(Result(name, before, newest, *tried), bounds))
        print(results[-1].row(), flush=True)
    if not arguments.only:
        wanted = [str(requirement) for name, requirement in direct.items() if name not in _NOT_TRIED]
        upgrade = ["--upgrade", "--upgrade-strategy", "eager", *wanted]
        results.append(Result(TOGETHER, "", "", *install_and_test(TOGETHER, upgrade, arguments.tests, directory)))
    (ROOT / "newest.md").write_text(table(results))
    print(table(results) if results else "All packages have their newest version.")
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())

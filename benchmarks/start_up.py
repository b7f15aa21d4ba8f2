"""Measure how long frequently used commands take, in turns, for one or two copies of the project.

    python benchmarks/start_up.py                        # this copy
    python benchmarks/start_up.py ../before . --turns 15  # two copies in turns

The commands run in each copy, with warm page caches, written bytecode and compiled kernels. The table has medians of
the wall time, and of user and system CPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

PROJECT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "-c pass",
    "-c import-numba",
    "--version",
    "--help",
    "merge --help",
    "plan --help",
    "check --help",
    "verify --help",
    "gate --help",
    "run --help",
    "methods",
    "merge profiles/demo/recipes/linear.yaml OUT",
    "merge profiles/demo/recipes/ties.yaml OUT",
)

COMPILE = """
from pathlib import Path
from mergegate.merge_core import EngineSettings, load_recipe, merge_weights, open_checkpoint, plan_merge, resolve_local
for name in ("linear", "ties"):
    recipe = load_recipe(Path(f"profiles/demo/recipes/{name}.yaml"))
    parents = {str(ref): open_checkpoint(resolve_local(ref, recipe.directory)) for ref in recipe.references()}
    merge_weights(plan_merge(recipe, parents), Path(OUT, name), device="cpu", settings=EngineSettings(kernels="fused"))
"""


def run(copy: Path, command: str, out: Path) -> tuple[float, float]:
    """Run a command of one copy, and return its wall and CPU seconds."""
    words = [str(out) if word == "OUT" else word for word in command.split()]
    arguments = ["-m", "mergegate", *words]
    if command == "compile":
        arguments = ["-c", COMPILE.replace("OUT", repr(str(out)))]
    elif words[0] == "-c":
        arguments = ["-c", words[1].replace("-", " ")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    shutil.rmtree(out, ignore_errors=True)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env={**environment, "PYTHONPATH": str(copy), "MERGEGATE_HOME": str(out.parent / "home")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime


def main() -> None:
    """Measure every command, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("copies", nargs="*", type=Path, default=[PROJECT], help="Copies of the project.")
    parser.add_argument("--turns", type=int, default=15, help="Runs of each command. Default: 15.")
    parser.add_argument("--only", default="", help="Measure only commands that contain this text.")
    options = parser.parse_args()
    copies = [copy.resolve() for copy in options.copies]
    times: dict[tuple[str, Path], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        if any(options.only in command for command in COMMANDS if "OUT" in command):
            for copy in copies:
                run(copy, "compile", Path(scratch) / "out")
        for turn in range(options.turns + 1):
            for command in COMMANDS:
                for copy in copies:
                    if options.only in command:
                        seconds = run(copy, command, Path(scratch) / "out")
                        if turn:  # the first turn writes the bytecode
                            times[command, copy].append(seconds)
    print("| command |" + "".join(f" {copy.name} | CPU |" for copy in copies))
    print("|---|" + "--:|--:|" * len(copies))
    for command in COMMANDS:
        if options.only in command:
            cells = [
                f" {median(wall for wall, _ in times[command, copy]):.2f} s"
                f" | {median(cpu for _, cpu in times[command, copy]):.2f} s |"
                for copy in copies
            ]
            print(f"| `{command}` |" + "".join(cells))


if __name__ == "__main__":
    main()

"""Measure how much time each part of a run takes, and which of its processes computes.

    python benchmarks/run_parts.py                             # dev/measurements/start-up.md
    python benchmarks/run_parts.py profiles/demo.yaml --again  # and a second run, which has nothing new

The run works on a copy of the profile's directory and has a new state directory, but it uses the user's cache of
compiled kernels and of Prefect's empty database. A part ends when the run prints the line of a stage.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from measure import family

PROJECT = Path(__file__).resolve().parent.parent
_TICKS = os.sysconf("SC_CLK_TCK")


class Moment(NamedTuple):
    """Seconds since the start of a run when it printed a line: wall time, and CPU of the run and its model process."""

    name: str
    wall: float
    run: float
    models: float

    def row(self, since: Moment) -> str:
        """Return the row of the table."""
        wall, run, models = self.wall - since.wall, self.run - since.run, self.models - since.models
        return f"| {self.name} | {wall:.1f} s | {run:.1f} s | {models:.1f} s |"


def moments(command: list[str], cwd: Path, environment: dict[str, str]) -> list[Moment]:
    """Run a command, and return the moments at which it printed the headline and the lines of stages, and its end."""
    before, began = os.times(), time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seconds: dict[int, float] = {}
    found: list[Moment] = []
    for line in process.stdout:
        words = line.split()
        if found and words[:1] != ["✓"]:
            continue
        for pid in family(process.pid):
            with suppress(OSError):  # The process ended during the scan.
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                seconds[pid] = (int(stat[11]) + int(stat[12])) / _TICKS
        models = sum(seconds.values()) - seconds[process.pid]
        found.append(Moment(words[1] if found else "headline", time.monotonic() - began, seconds[process.pid], models))
    if process.wait():
        raise SystemExit(f"exit code {process.returncode} of {' '.join(command)}")
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return [*found, Moment("end", time.monotonic() - began, cpu - found[-1].models, found[-1].models)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path, default=PROJECT / "profiles/demo.yaml")
    parser.add_argument("--again", action="store_true", help="also measure a second run")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "profiles"
        shutil.copytree(said.profile.parent, copy)
        environment = {**os.environ, "MERGEGATE_HOME": str(Path(scratch) / "home"), "NO_COLOR": "1"}
        environment.pop("PREFECT_API_URL", None)
        command = [sys.executable, "-u", "-m", "mergegate", "run", str(copy / said.profile.name)]
        for _ in range(1 + said.again):
            start = Moment("start", 0.0, 0.0, 0.0)
            found = moments(command, Path(scratch), environment)
            rows = [moment.row(since) for moment, since in zip(found, [start, *found], strict=False)]
            total = found[-1]._replace(name="total").row(start)
            print(
                "| until the line of | wall | CPU, run | CPU, model process |",
                "|---|--:|--:|--:|",
                *rows,
                total,
                sep="\n",
            )


if __name__ == "__main__":
    main()

"""Measure each part of a scheduled run: with nothing new, with one changed threshold, with one new parent.

::

    .venv/bin/python benchmarks/quiet_night.py                # the table of dev/measurements/run-cost.md
    .venv/bin/python benchmarks/quiet_night.py --mergegate OTHER/.venv/bin/mergegate   # of another version

The script releases the demo family once in a separate directory. Runs of each kind then take turns, with
``prefect version`` between them, so that other load on the machine affects all of them. ``--events`` reports the
course of a run. The time before the first stage is Python, imports and Prefect's API. Each stage reports its seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROFILE = Path("profiles/demo.yaml")
_number = count(1)


class Night(NamedTuple):
    """Seconds of one run."""

    whole: float
    before: float  # until the first stage starts
    stages: dict[str, float]

    @property
    def after(self) -> float:
        """Seconds between the stages and after the last one."""
        return self.whole - self.before - sum(self.stages.values())


def nothing_new(project: Path) -> None:
    """Change nothing since the previous run."""


def changed_threshold(project: Path) -> None:
    """Change the margin of the perplexity, so that only the gate and later stages run."""
    path = project / PROFILE
    path.write_text(re.sub(r"max_increase: [\d.]+%", f"max_increase: {5 + next(_number) / 100}%", path.read_text()))


def new_parent(project: Path) -> None:
    """Change a weight of one fine-tune, so that the merge is rebuilt and both are measured again."""
    path = project / "profiles/demo/models/reverser/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1 << (next(_number) % 3)  # one of the lowest bits of a value
    path.write_bytes(content)


KINDS: dict[str, Callable[[Path], None]] = {
    "nothing new": nothing_new,
    "one changed threshold": changed_threshold,
    "one new parent": new_parent,
}


def night(mergegate: Path, project: Path) -> Night:
    """Run once, as a schedule does."""
    began, wall = time.monotonic(), time.time()
    done = subprocess.run(
        [mergegate, "run", PROFILE, "--events"], cwd=project, capture_output=True, text=True, check=False
    )
    whole = time.monotonic() - began
    if done.returncode not in (0, 3):
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    events = [json.loads(line) for line in done.stdout.splitlines()]
    stages: dict[str, float] = {}
    for one in events:
        if one["event"] == "ended":
            stages[one["stage"]] = stages.get(one["stage"], 0.0) + one["seconds"]
    first = next(one["time"] for one in events if one["event"] == "started")
    return Night(whole, first - wall, stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mergegate", type=Path, default=Path(sys.executable).with_name("mergegate"))
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory)
        (project / "profiles").mkdir()
        shutil.copy(ROOT / PROFILE, project / PROFILE)
        shutil.copytree(ROOT / "profiles/demo", project / "profiles/demo")
        nights: dict[str, list[Night]] = {kind: [] for kind in KINDS}
        prefect: list[float] = []
        first = night(options.mergegate, project)
        for _ in range(options.turns):
            for kind, change in KINDS.items():
                if kind == "nothing new":
                    night(options.mergegate, project)  # finish the work that the previous kind's change caused
                change(project)
                nights[kind].append(night(options.mergegate, project))
            began = time.monotonic()
            subprocess.run([options.mergegate.with_name("prefect"), "version"], capture_output=True, check=True)
            prefect.append(time.monotonic() - began)
        print(table(nights | {"first run": [first]}, prefect))


def table(nights: dict[str, list[Night]], prefect: list[float]) -> str:
    """Return Markdown with medians, smallest and largest values."""
    lines = [
        f"`prefect version`: {_seconds(prefect)} s; load {os.getloadavg()[0]:.1f}",
        "",
        "| scheduled run | seconds | ÷ `prefect version` | before the first stage | slowest stages | other |",
        "|---|--:|--:|--:|---|--:|",
    ]
    base = statistics.median(prefect)
    for kind, each in nights.items():
        names = {name for one in each for name in one.stages}
        by_name = {name: statistics.median(one.stages.get(name, 0.0) for one in each) for name in names}
        most = sorted(by_name.items(), key=lambda item: -item[1])[:4]
        said = ", ".join(f"{name} {seconds:.1f}" for name, seconds in most if seconds >= 0.05) or "none"
        whole = statistics.median(one.whole for one in each)
        lines.append(
            f"| {kind} | {_seconds([one.whole for one in each])} | {whole / base:.2f} | "
            f"{statistics.median(one.before for one in each):.1f} | {said} | "
            f"{statistics.median(one.after for one in each):.1f} |"
        )
    return "\n".join(lines)


def _seconds(each: list[float]) -> str:
    return f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})"


if __name__ == "__main__":
    main()

"""Measure which part of a run and which of its processes uses how much time.

    python benchmarks/run_parts.py                             # docs/benchmarks/run-parts.md
    python benchmarks/run_parts.py profiles/demo.yaml --again  # and a second run, which has nothing new

The run has no state: it gets new directories for its caches, its Prefect database and its releases, and works on a copy
of the profile's directory. A part begins when the run prints a line, so each stage counts until the stage's own line.
Processor time is read from ``/proc`` every 50 ms, for each process of the run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from measure import family

PROJECT = Path(__file__).resolve().parent.parent
_INTERVAL = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Processors:
    """Processor seconds of each process so far, by its role."""

    root: int
    seconds: dict[int, float] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)

    def read(self) -> dict[str, float]:
        """Return the processor seconds of each role, including processes that have ended."""
        for pid in family(self.root):
            try:
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # The process ended during the scan.
            self.seconds[pid] = (int(words[11]) + int(words[12])) / _TICKS
            self.roles[pid] = self._role(pid, command)
        total: dict[str, float] = {}
        for pid, seconds in self.seconds.items():
            total[self.roles[pid]] = total.get(self.roles[pid], 0.0) + seconds
        return total

    def _role(self, pid: int, command: str) -> str:
        if pid == self.root:
            return "run"
        if "prefect" in command or "uvicorn" in command:
            return "Prefect"
        return "models"


def parts(command: list[str], cwd: Path, environment: dict[str, str]) -> list[tuple[str, float, dict[str, float]]]:
    """Run a command, and return the name, wall seconds and processor seconds by role of each part."""
    lines: list[str] = []
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout is not None
    output = process.stdout
    reader = threading.Thread(target=lambda: lines.extend(iter(output.readline, "")), daemon=True)
    reader.start()
    processors = Processors(process.pid)
    began = last = time.monotonic()
    used: dict[str, float] = {}
    found: list[tuple[str, float, dict[str, float]]] = []
    seen = 0
    while True:
        ended = process.poll() is not None
        now, cpu = time.monotonic(), processors.read()
        for line in lines[seen:]:
            words = line.split()
            name = words[1] if words[:1] == ["✓"] else "headline" if not found else ""
            if name:
                found.append((name, now - last, {role: cpu[role] - used.get(role, 0.0) for role in cpu}))
                last, used = now, cpu
        seen = len(lines)
        if ended:
            found.append(("end", now - last, {role: cpu[role] - used.get(role, 0.0) for role in cpu}))
            found.append(("total", now - began, cpu))
            break
        time.sleep(_INTERVAL)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}\n{''.join(lines)}")
    return found


def table(found: list[tuple[str, float, dict[str, float]]]) -> str:
    """Return the parts as Markdown."""
    roles = sorted({role for _, _, cpu in found for role in cpu}, reverse=True)
    header = "".join(f" CPU, {role} |" for role in roles)
    lines = [f"| until | wall |{header}", "|---|--:|" + "--:|" * len(roles)]
    for name, wall, cpu in found:
        lines.append(f"| {name} | {wall:.1f} s | " + " | ".join(f"{cpu.get(role, 0.0):.1f} s" for role in roles) + " |")
    return "\n".join(lines)


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
            print(table(parts(command, Path(scratch), environment)), end="\n\n")


if __name__ == "__main__":
    main()

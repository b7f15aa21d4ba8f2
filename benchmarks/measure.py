"""Run one command in a process of its own and say how long it took and how much anonymous memory it needed.

Anonymous memory (``RssAnon``) is what a machine must have: mapped files and the page cache are given back under
pressure. It is read from ``/proc`` every 20 ms for the process and all its descendants; Linux only.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_INTERVAL = 0.02


@dataclass(frozen=True)
class Measurement:
    """One run.

    Args:
        seconds: Wall-clock time of the process, from its start to its end.
        cpu_seconds: Processor time of it and its children, user and system.
        system_seconds: The system's part of that: reading and writing files, finding memory.
        peak_anonymous: Largest sum of anonymous memory seen, bytes.
        peak_device: Largest reading of the gauge, bytes; 0 without one.
        output: What it printed to standard output.
    """

    seconds: float
    cpu_seconds: float
    system_seconds: float
    peak_anonymous: int
    peak_device: int
    output: str


def measure(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    gauge: Callable[[], int] | None = None,
) -> Measurement:
    """Run ``command`` and watch it; ``gauge`` says how many bytes of a GPU are in use.

    Raises:
        SystemExit: It failed; its last lines are shown.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        before = os.times()
        began = time.monotonic()
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            stdout=out,
            stderr=err,
        )
        peak = device = 0
        while process.poll() is None:
            device = max(device, gauge() if gauge else 0)
            peak = max(peak, sum(anonymous_memory(pid) for pid in family(process.pid)))
            time.sleep(_INTERVAL)
        seconds = time.monotonic() - began
        after = os.times()
        out.seek(0)
        err.seek(0)
        output, errors = out.read(), err.read()
    if process.returncode != 0:
        tail = "\n".join((output + errors).splitlines()[-15:])
        raise SystemExit(f"exit code {process.returncode} of {' '.join(map(str, command))}\n{tail}")
    system = after.children_system - before.children_system
    cpu = after.children_user - before.children_user + system
    return Measurement(seconds, cpu, system, peak, device, output)


def evict(files: Iterable[Path]) -> None:
    """Make the next read of ``files`` come from the disk.

    Only these files are dropped from the page cache: programs and libraries stay, as on a machine in use.
    """
    os.sync()  # Pages that are not on the disk yet cannot be dropped.
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def give_memory_back(pause: float) -> None:
    """Drop what the page cache has of clean files, and wait until a virtual machine's host has taken the memory back.

    So every run begins like the first one of a night: memory that is free, and has to be found. Where that is not
    allowed (it takes an administrator), nothing happens.

    Args:
        pause: Seconds; Linux reports free pages to its host after two.
    """
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")
        time.sleep(pause)


def family(pid: int) -> list[int]:
    """The process and its descendants, as far as they still run."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        found.append(parent)
        try:
            for thread in Path(f"/proc/{parent}/task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue  # It ended while we looked.
    return found


def anonymous_memory(pid: int) -> int:
    """Bytes of anonymous memory of a process; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0

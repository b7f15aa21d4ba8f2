"""Run one command in a separate process and measure its time and its anonymous memory.

A machine must provide anonymous memory (``RssAnon``), while it can reclaim mapped files and the page cache under
pressure. The module reads it from ``/proc`` every 20 ms for the process and all its descendants. Linux only.
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
        seconds: Wall-clock time of the process, from start to end.
        cpu_seconds: Processor time of the process and its children, user and system.
        system_seconds: System part of ``cpu_seconds``, spent on reading and writing files and allocating memory.
        peak_anonymous: Largest total of anonymous memory that was read, in bytes.
        peak_device: Largest reading of the gauge, in bytes; 0 without a gauge.
        output: Standard output of the process.
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
    """Run ``command`` and monitor it; ``gauge`` returns the number of a GPU's bytes in use.

    Raises:
        SystemExit: The command failed; the message contains its last lines.
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

    Only these files leave the page cache. Programs and libraries stay in it, as on a machine in use.
    """
    os.sync()  # Pages that are not on the disk yet cannot be dropped.
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def give_memory_back(pause: float) -> None:
    """Drop clean files from the page cache, and wait until a virtual machine's host has reclaimed the memory.

    Every run then begins like the first run after a quiet period: memory is free and must be allocated. Without
    administrator rights, the function does nothing.

    Args:
        pause: Wait in seconds; Linux reports free pages to its host after two.
    """
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")
        time.sleep(pause)


def family(pid: int) -> list[int]:
    """Return the process and those of its descendants that still run."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        found.append(parent)
        try:
            for thread in Path(f"/proc/{parent}/task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue  # The process ended during the scan.
    return found


def anonymous_memory(pid: int) -> int:
    """Return the bytes of anonymous memory of a process, or 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0

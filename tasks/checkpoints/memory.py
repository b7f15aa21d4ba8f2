"""How much memory there is: of this system or the container that we are confined to, and of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks.outside import CONTROL_GROUPS, kernel_lines


@dataclass(frozen=True)
class Capacity:
    """Bytes of one kind of memory."""

    total: int
    available: int


def system_memory() -> Capacity | None:
    """Of this system, or of the control group that we are confined to; None where the system does not say."""
    if not (lines := kernel_lines("meminfo")):
        return None
    sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    system = Capacity(sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"]))
    group = control_group()
    if group is None or group.total >= system.total:
        return system
    return Capacity(group.total, min(group.available, system.available))


def control_group(place: Path = CONTROL_GROUPS) -> Capacity | None:
    """The limit of a container (cgroup version 2); None without one."""
    try:
        limit = int((place / "memory.max").read_text())
        used = int((place / "memory.current").read_text())
        numbers = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such limit, or "max"
        return None
    # Cached files count as used, and go when memory is asked for.
    return Capacity(limit, limit - used + int(numbers.get("inactive_file", 0)) + int(numbers.get("active_file", 0)))


def gpu_memory(device: str) -> Capacity | None:
    """Of ``cuda`` or ``cuda:N``; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device if ":" in device else torch.cuda.current_device())
    return Capacity(total, free)

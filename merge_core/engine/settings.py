"""Define how to run a merge, without influence on its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mergegate.merge_core.system import cores_of_process


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine. They do not influence the result.

    Args:
        threads: Number of worker threads. Default: two more than there are cores, so that some can wait for the disk.
        block_elements: Elements per block.
        tile_elements: Elements that an unfused CPU computation processes at a time, so that they stay in the cache.
        keep_output: Whether the result stays in the page cache for the next reader.
        kernels: ``fused``, ``torch``, or ``auto``: fused on a CPU if there is enough input.
    """

    threads: int | None = None
    block_elements: int = 1 << 20
    tile_elements: int = 1 << 15
    keep_output: bool = True
    kernels: Literal["auto", "fused", "torch"] = "auto"

    @property
    def workers(self) -> int:
        """Number of worker threads on this machine."""
        return self.workers_on(usable_cores())

    def workers_on(self, cores: int) -> int:
        """Number of worker threads on a machine with ``cores`` usable cores."""
        return self.threads or cores + 2


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return cores_of_process()

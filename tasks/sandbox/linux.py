"""What of this project needs Linux, asked where a child process is begun.

Child processes are kept in bounds and end with us by calls that only Linux has: prctl(2) (``supervised``), unshare(2)
(``confinement``), ``/proc`` (``supervised``, ``gpu_lock``). Without them a killed run would leave processes that hold a
GPU, and foreign code would reach the network, so no model and no task is run elsewhere. Merging alone (``merge``,
``plan``) needs none of them: what it takes of Linux is in ``merge_core/system.py``, with what stands in for it.
"""

from __future__ import annotations

import sys

from mergegate.merge_core.errors import Refused


def require_linux(system: str = sys.platform) -> None:
    """
    Raises:
        Refused: when this system is none on which models can be run in bounds.
    """
    if system != "linux":
        raise Refused(
            "this system",
            found=system,
            expected="Linux: models and tasks run in child processes that only its prctl(2) and /proc keep in bounds",
            remedy="run it in a container (containers/ has the image); plan and merge work here",
        )

"""Check for Linux before a child process is started.

Child processes are confined and supervised by system interfaces that only Linux has: prctl(2) (``supervision``),
unshare(2) (``confinement``) and ``/proc`` (``supervision``, ``gpu_lock``). Without them, a killed run would leave
processes that hold a GPU, and third-party code would have network access. So models and tasks run on Linux only.
Merging alone (``merge``, ``plan``) does not need them; ``merge_core/system.py`` wraps its system calls, with fallbacks.
"""

from __future__ import annotations

import sys

from mergegate.merge_core.errors import Refused


def require_linux(system: str = sys.platform) -> None:
    """Raise Refused unless this system is Linux."""
    if system != "linux":
        raise Refused(
            "this system",
            found=system,
            expected="Linux: models and tasks run in child processes that only its prctl(2) and /proc keep in bounds",
            remedy="run it in a container (containers/ has the image); plan and merge work here",
        )

"""Prepare the start of a child process: require Linux, and compile its imports in advance.

Child processes are confined and supervised by system interfaces that only Linux has: prctl(2) (``supervision``),
unshare(2) (``confinement``) and ``/proc`` (``supervision``, ``gpu_lock``). Without them, a killed run would leave
processes that hold a GPU, and third-party code would have network access. So models and tasks run on Linux only. The
commands ``merge`` and ``plan`` work on all systems.

Some installers compile modules only on the first import (``uv pip install``, ``pip install --no-compile``). A process
that may not write to the library directories would compile all modules on every start, which takes half of the time
until it is ready.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mergegate.merge_core.errors import Refused
from mergegate.merge_core.files import hold_lock

_PATIENCE_S = 600.0  # after that, the caller continues without compiled modules


def require_linux(system: str = sys.platform) -> None:
    """Raise Refused unless this system is Linux."""
    if system != "linux":
        raise Refused(
            "this system",
            found=f"{system} cannot run models and tasks",
            expected="Linux, whose prctl(2) and /proc are needed to supervise child processes",
            remedy="run mergegate in a container (the image is in containers/). The commands plan and merge work here",
        )


def compile_imports(python: str | Path, imports: str, last_source: Path, environment: Mapping[str, str]) -> None:
    """Run the import statements ``imports`` once in a subprocess without confinement, so that ``python`` compiles them.

    Failing imports are ignored. ``last_source`` is the source file of the last imported module. If it is compiled, the
    others are assumed to be, too.
    """

    def is_compiled() -> bool:
        return any(last_source.parent.glob(f"__pycache__/{last_source.stem}.*.pyc"))

    if sys.dont_write_bytecode or is_compiled():
        return
    if not last_source.is_file() or not os.access(last_source.parent, os.W_OK):
        return
    with hold_lock(last_source.parent, required=False):  # only one of several simultaneous runs compiles
        if is_compiled():
            return
        command, devnull = [str(python), "-P", "-c", imports], subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the confined process reports the same error
            subprocess.run(command, env=environment, stdout=devnull, stderr=devnull, check=False, timeout=_PATIENCE_S)

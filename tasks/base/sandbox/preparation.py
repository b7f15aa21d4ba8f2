"""Compile the imports of a child process before it starts.

Some installers compile modules only on the first import (``uv pip install``, ``pip install --no-compile``). A process
that may not write to the library directories would compile all modules on every start, which takes half of the time
until it is ready.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mergegate.merge_core.files import hold_lock
from mergegate.tasks.base.sandbox.supervision import NotStarted, ProcessOptions, SupervisedProcess

_PATIENCE_S = 600.0  # after that, the caller continues without compiled modules


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
        command, options = [str(python), "-P", "-c", imports], ProcessOptions("compile", limit=_PATIENCE_S)
        # The confined process reports the same error. The supervision ends this one together with an interrupted run.
        with contextlib.suppress(OSError, NotStarted), Path(os.devnull).open("wb") as output:
            SupervisedProcess(command, environment, output, options).wait()

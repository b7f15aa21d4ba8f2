"""Compile the imports of a confined process in advance, if the installer did not.

Some installers leave compilation to the first import (``uv pip install``, ``pip install --no-compile``). A process that
may not write to the library directories would compile all modules on every start, which takes half of the time to the
first answer.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mergegate.merge_core.files import locked

_PATIENCE = 600.0  # seconds; after that, the caller continues without compiled modules


def compile_imports(python: str | Path, imports: str, last_source: Path, environment: Mapping[str, str]) -> None:
    """Import modules once in a subprocess without confinement, so that ``python`` compiles them.

    Args:
        imports: Import statement to run. A failing import is ignored.
        last_source: Source file of the last imported module. If it is compiled, the rest is too.
        environment: Environment of the subprocess.
    """
    if sys.dont_write_bytecode:
        return  # Python is configured not to write bytecode
    if _is_compiled(last_source) or not last_source.is_file() or not os.access(last_source.parent, os.W_OK):
        return
    with locked(last_source.parent, required=False):  # only one of several simultaneous runs compiles
        if _is_compiled(last_source):
            return
        command, devnull = [str(python), "-P", "-c", imports], subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the confined process reports the same error
            subprocess.run(command, env=environment, stdout=devnull, stderr=devnull, check=False, timeout=_PATIENCE)


def _is_compiled(source: Path) -> bool:
    return any(source.parent.glob(f"__pycache__/{source.stem}.*.pyc"))

"""What a confined process imports, compiled beforehand where an installer has compiled nothing.

Some installers leave compiling to the first import (``uv pip install``, ``pip install --no-compile``). A process that
may not write where libraries lie would compile them all each time it starts: half of the time to the first answer.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mergegate.merge_core.files import locked

_PATIENCE = 600.0  # seconds for an import that hangs: whoever asks goes on without


def compile_imports(python: str | Path, imports: str, last: Path, environment: Mapping[str, str]) -> None:
    """Have ``python`` import, as ourselves, what a confined process will, unless that has been done before.

    Args:
        imports: A statement that imports it; that it fails is no fault here.
        last: The source of what it imports last. Where that is compiled, so is the rest.
        environment: Of the process that imports.
    """
    if sys.dont_write_bytecode:
        return  # nobody is to compile, so that would be in vain
    if _is_compiled(last) or not last.is_file() or not os.access(last.parent, os.W_OK):
        return
    with locked(last.parent, required=False):  # by one run of several that begin at the same time
        if _is_compiled(last):
            return
        command, nowhere = [str(python), "-P", "-c", imports], subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # Whoever is started next says why it cannot be.
            subprocess.run(command, env=environment, stdout=nowhere, stderr=nowhere, check=False, timeout=_PATIENCE)


def _is_compiled(source: Path) -> bool:
    return any(source.parent.glob(f"__pycache__/{source.stem}.*.pyc"))

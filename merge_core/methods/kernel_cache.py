"""Locate the cache of compiled kernels, and record what is in it, without importing numba.

numba recompiles a function if its file changes, but not if functions in other files change that it calls. Therefore the
directory is named after a digest of all kernel sources. It is in ``$NUMBA_CACHE_DIR`` or, by default, in the user's
cache directory.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from mergegate.merge_core.files import user_cache


@cache
def kernel_directory() -> str | None:
    """Return the directory of this version's compiled kernels, or None if it cannot be created."""
    digest = hashlib.sha256()
    for source in sorted((Path(__file__).parent / "kernels").glob("*.py")):
        digest.update(source.read_bytes())
    try:
        configured = os.environ.get("NUMBA_CACHE_DIR")
        directory = (Path(configured) if configured else user_cache()) / f"kernels-{digest.hexdigest()[:16]}"
        directory.mkdir(parents=True, exist_ok=True)
        return str(directory) if os.access(directory, os.W_OK | os.X_OK) else None
    except (OSError, RuntimeError):
        return None


def has_kernels(use: str) -> bool:
    """Return whether a merge with this ``use`` of kernels has probably compiled all that it needs.

    If numba or the processor has changed since, the answer may be wrong, and the next such merge compiles once.
    """
    record = _record(use)
    return record is not None and record.exists()


def record_kernels(use: str) -> None:
    """Record that the kernels of ``use`` are compiled."""
    record = _record(use)
    if record is not None:
        with suppress(OSError):  # Without a record, small merges compute with torch.
            record.touch()


def _record(use: str) -> Path | None:
    directory = kernel_directory()
    # numba compiles for each version of Python and each copy of the sources.
    key = hashlib.sha256(os.fsencode(f"{sys.version_info[:2]} {__file__} {use}")).hexdigest()
    return Path(directory) / f"compiled-{key[:16]}" if directory is not None else None

"""How kernels are compiled: without the GIL, kept on disk, and never used when their source has changed.

numba notices a change in a function's own file only, not in the functions that it calls; so compiled code lies in a
directory named after a digest of all kernel sources. That directory is below ``$NUMBA_CACHE_DIR``, else below the
user's cache directory: an installed package may be read-only. numba replaces files there atomically, so several
processes may compile at once. Where nothing can be written, every process compiles for itself.

The first merge on a machine waits for the compiler, so kernels avoid what takes it long: assignment of arrays to arrays
(1.5 s, for the text of an error), ``view`` of an array (0.2 s; of a number almost nothing), ``np.zeros`` where all is
overwritten (0.1 s). What only some calls need stands behind ``is not None``: passed None, numba compiles a kernel
without it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` on its first call: IEEE arithmetic, no GIL, one thread."""
    return _compiled(function)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` for kernels that call it, not for calls from Python, which takes half the time."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiled(function: Callable[..., Any], **options: bool) -> Callable[..., Any]:
    config: Any = numba.config
    njit: Any = numba.njit  # Its annotations lack the wrappers' options.
    place, before = _place(), config.CACHE_DIR
    if place is not None:
        config.CACHE_DIR = place  # Read when the decorator runs, not when the function is compiled.
    try:
        kernel: Callable[..., Any] = njit(nogil=True, cache=place is not None, error_model="numpy", **options)(function)
    finally:
        config.CACHE_DIR = before
    return kernel


@cache
def _place() -> str | None:
    """Directory of this version's compiled kernels; None when it cannot be made."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        chosen = os.environ.get("NUMBA_CACHE_DIR")
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        place = (Path(chosen) if chosen else user / "mergegate") / f"kernels-{digest.hexdigest()[:16]}"
        place.mkdir(parents=True, exist_ok=True)
        return str(place) if os.access(place, os.W_OK) else None
    except (OSError, RuntimeError):
        return None

"""Compile kernels with numba, and cache the compiled code on disk.

numba recompiles a function if its file changes, but not if functions in other files change that it calls. Therefore the
cache directory is named after a digest of all kernel sources. It is in ``$NUMBA_CACHE_DIR`` or, by default, in the
user's cache directory. numba replaces files there atomically, so several processes may compile concurrently. If the
directory is not writable, every process compiles for itself.

The first merge on a machine waits for the compiler, so kernels avoid constructs that compile slowly: assignment of
arrays to arrays (1.5 s), ``view`` of an array (0.2 s; almost nothing for a number), and ``np.zeros`` for arrays that
are fully overwritten (0.1 s). Code that only some calls need is guarded by ``is not None``, because numba omits it for
calls that pass None.
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
    """Compile ``function`` on its first call, with IEEE arithmetic, without the GIL, for one thread."""
    return _compiled(function)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` for calls from other kernels only. This takes half the time of :func:`compiled`."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiled(function: Callable[..., Any], **options: bool) -> Callable[..., Any]:
    config: Any = numba.config
    njit: Any = numba.njit  # Its annotations lack the wrappers' options.
    directory, previous_directory = _cache_directory(), config.CACHE_DIR
    if directory is not None:
        config.CACHE_DIR = directory  # Read when the decorator runs, not when the function is compiled.
    try:
        kernel: Callable[..., Any] = njit(nogil=True, cache=directory is not None, error_model="numpy", **options)(
            function
        )
    finally:
        config.CACHE_DIR = previous_directory
    return kernel


@cache
def _cache_directory() -> str | None:
    """Return the directory of this version's compiled kernels, or None if it cannot be created."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        configured = os.environ.get("NUMBA_CACHE_DIR")
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = (
            Path(configured) if configured else user_cache / "mergegate"
        ) / f"kernels-{digest.hexdigest()[:16]}"
        directory.mkdir(parents=True, exist_ok=True)
        return str(directory) if os.access(directory, os.W_OK) else None
    except (OSError, RuntimeError):
        return None

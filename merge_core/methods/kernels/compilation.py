"""Compile kernels with numba, and cache the compiled code on disk.

numba replaces files in the cache directory atomically, so several processes may compile concurrently. If the directory
is not writable, every process compiles for itself.

The first merge on a machine waits for the compiler, so kernels avoid constructs that compile slowly: assignment of
arrays to arrays (1.5 s), ``view`` of an array (0.2 s; almost nothing for a number), and ``np.zeros`` for arrays that
are fully overwritten (0.1 s). Code that only some calls need is guarded by ``is not None``, because numba omits it for
calls that pass None.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numba

from mergegate.merge_core.methods import kernel_directory


def _import_array_functions() -> None:
    """Import numba's array functions, which loading a kernel needs, without ``scipy.linalg``.

    numba imports it (0.2 s, a tenth of a small merge) only to find out whether a BLAS library is available. Kernels use
    none, and mergegate requires scipy, which contains one.
    """
    linalg: Any = import_module("numba.np.linalg")
    if (check := getattr(linalg, "ensure_blas", None)) is None:
        return  # another version of numba
    linalg.ensure_blas = lambda: None
    try:
        import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = check


_import_array_functions()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` on its first call, with IEEE arithmetic, without the GIL, for one thread."""
    return _compiled(function)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` for calls from other kernels only. This takes half the time of :func:`compiled`."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiled(function: Callable[..., Any], **options: bool) -> Callable[..., Any]:
    config: Any = numba.config
    njit: Any = numba.njit  # Its annotations lack the wrappers' options.
    directory, previous_directory = kernel_directory(), config.CACHE_DIR
    if directory is not None:
        config.CACHE_DIR = directory  # Read when the decorator runs, not when the function is compiled.
    try:
        kernel: Callable[..., Any] = njit(nogil=True, cache=directory is not None, error_model="numpy", **options)(
            function
        )
    finally:
        config.CACHE_DIR = previous_directory
    return kernel

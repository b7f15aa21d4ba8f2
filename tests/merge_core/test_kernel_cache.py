"""Compiled kernels are kept where they can be, and are not needed where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INSPECT = (
    "import numpy as np; from merge_core.methods import kernels;"
    "words = np.array([0, 0x7F80, 1], np.uint64);"
    "assert kernels.inspect(words, np.uint64(0x7F80), np.uint64(0x80)) == (0x8080, 0x7F81)"
)


def run(**environment: str) -> None:
    """Use a kernel in a fresh process."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    subprocess.run([sys.executable, "-c", INSPECT], env={**inherited, **environment}, check=True)


def kept(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.rglob("*.nbc")}


def test_a_kernel_is_compiled_once_and_kept_in_the_users_cache(tmp_path: Path) -> None:
    run(XDG_CACHE_HOME=str(tmp_path))
    first = kept(tmp_path / "mergegate")
    assert first
    run(XDG_CACHE_HOME=str(tmp_path))
    assert kept(tmp_path / "mergegate") == first


def test_where_nothing_can_be_written_a_kernel_works_all_the_same() -> None:
    run(XDG_CACHE_HOME="/dev/null/nowhere")

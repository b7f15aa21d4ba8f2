"""Compiled kernels are cached if possible, work without a cache, and are compiled only when a merge needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from family import MERGE_FUSED, recipe_of

INSPECT = (
    "import numpy as np; from mergegate.merge_core.methods import kernels;"
    "words = np.array([0, 0x7F80, 1], np.uint64);"
    "assert kernels.inspect(words, np.uint64(0x7F80), np.uint64(0x80)) == (0x8080, 0x7F81)"
)


def run(code: str = INSPECT, place: Path | None = None, **environment: str) -> None:
    """Use kernels in a fresh process."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    subprocess.run([sys.executable, "-c", code], cwd=place, env={**inherited, **environment}, check=True)


def kept(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.rglob("*.nbc")}


@pytest.mark.story
def test_a_kernel_is_compiled_once_and_cached_for_the_user(tmp_path: Path) -> None:
    run(XDG_CACHE_HOME=str(tmp_path))
    first = kept(tmp_path / "mergegate")
    assert first
    run(XDG_CACHE_HOME=str(tmp_path))
    assert kept(tmp_path / "mergegate") == first


@pytest.mark.story
def test_kernels_work_without_a_writable_cache() -> None:
    run(XDG_CACHE_HOME="/dev/null/nowhere")


@pytest.mark.story
def test_rules_that_keep_everything_compile_no_code_for_masks(wide: Path) -> None:
    """Compiling the unneeded drop rules would take most of the seconds before a first merge."""
    (wide / "recipe.yaml").write_text(recipe_of("task_arithmetic"))
    run(MERGE_FUSED, wide, NUMBA_CACHE_DIR=str(wide / "cache"))
    compiled = {name.split("-")[0] for name in kept(wide / "cache")}
    assert "task_vectors.task_vectors" in compiled
    assert {name for name in compiled if name.startswith(("ranks.", "sparsify."))} == {
        "sparsify.sparsify",
        "sparsify.apply_mask",  # a mask that an earlier pass stored; it has no rule
    }

"""A base and three fine-tunes, small enough for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from family import random_tensors, save_checkpoint


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A directory with float32 checkpoints ``base``, ``a``, ``b`` and ``c``."""
    base = random_tensors(0)
    save_checkpoint(tmp_path / "base", base)
    for seed, name in enumerate("abc", start=1):
        save_checkpoint(tmp_path / name, random_tensors(seed, base))
    return tmp_path

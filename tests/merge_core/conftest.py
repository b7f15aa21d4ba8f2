"""Provides a base and three fine-tunes, small enough for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family import random_tensors, save_checkpoint, save_family


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A directory with float32 checkpoints ``base``, ``a``, ``b`` and ``c``."""
    return save_family(tmp_path)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Bfloat16 checkpoints with a tensor of several grains, so that blocks and equal magnitudes matter."""
    base = {"model.embed_tokens.weight": torch.randn(1100, 64, generator=torch.Generator().manual_seed(0)) * 0.02}
    config = {"num_hidden_layers": 0}
    save_checkpoint(tmp_path / "base", {name: t.bfloat16() for name, t in base.items()}, config=config)
    for seed, name in enumerate("abc", start=1):
        noise = 1e-3 * torch.randn(1100, 64, generator=torch.Generator().manual_seed(seed))
        save_checkpoint(tmp_path / name, {key: (t + noise).bfloat16() for key, t in base.items()}, config=config)
    return tmp_path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of equal shapes, ``a`` and ``b``, whose tokenizers each test writes."""
    root = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate("ab"):
        save_checkpoint(root / name, random_tensors(seed, tokens=512))
    return root

"""A tensor computed while it is read merges like a stored one, at any block size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.checkpoint import Checkpoint, DerivedTensor, StoredTensor, patterns
from mergegate.merge_core.engine import EngineSettings
from mergegate.merge_core.errors import InvalidInput

ROWS, WIDTH = 37, 8


@dataclass(frozen=True)
class Scaled(DerivedTensor):
    """``factor`` times a stored tensor."""

    source: StoredTensor
    factor: float

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.source,)

    def identity(self) -> Any:
        return self.factor

    def open(self, read: Callable[..., None]) -> Callable[..., None]:
        def elements(first: int, into: np.ndarray) -> None:
            stored = np.empty(len(into), np.uint8)
            read(self.source, first, stored)
            into.view(np.float32)[:] = patterns(stored, self.dtype).view(np.float32) * np.float32(self.factor)

        return elements


def scaled(checkpoint: Checkpoint, factor: float) -> Checkpoint:
    tensors = {
        name: Scaled(name, tensor.dtype, tensor.shape, tensor, factor) for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Checkpoint]:
    generator = torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        place = tmp_path / name
        place.mkdir()
        (place / "config.json").write_text('{"architectures": ["X"]}')
        weights = {f"layers.{n}.up_proj.weight": torch.randn(ROWS, WIDTH, generator=generator) for n in range(2)}
        save_file(weights, place / "model.safetensors")
    return {name: open_checkpoint(tmp_path / name) for name in ("a", "b")}


@pytest.mark.parametrize("method", ["linear", "slerp", "ties"])
@pytest.mark.parametrize("block", [1 << 24, 64])
def test_is_merged_as_if_it_were_stored(pair: dict[str, Checkpoint], tmp_path: Path, method: str, block: int) -> None:
    recipe = load_recipe(
        {
            "merge_method": method,
            "base_model": "a",
            "models": [{"model": "b", "parameters": {"weight": 1.0} if method != "slerp" else {}}],
            "parameters": {"t": 0.25} if method == "slerp" else {},
        }
        if method != "linear"
        else {
            "merge_method": "linear",
            "models": [{"model": name, "parameters": {"weight": 1.0}} for name in ("a", "b")],
        }
    )
    other = tmp_path / "twice"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["X"]}')
    weights = {name: 2 * tensor for name, tensor in load_file(tmp_path / "b/model.safetensors").items()}
    save_file(weights, other / "model.safetensors")
    settings = EngineSettings(block_elements=block, threads=2)
    asked = merge_weights(
        plan_merge(recipe, {**pair, "b": scaled(pair["b"], 2.0)}), tmp_path / "derived", settings=settings
    )
    expected = merge_weights(
        plan_merge(recipe, {**pair, "b": open_checkpoint(other)}), tmp_path / "stored", settings=settings
    )
    assert asked.files == expected.files


def test_what_comes_out_of_it_must_be_finite(pair: dict[str, Checkpoint], tmp_path: Path) -> None:
    recipe = load_recipe(
        {
            "merge_method": "linear",
            "models": [{"model": name, "parameters": {"weight": 1.0}} for name in ("a", "b")],
        }
    )
    with pytest.raises(InvalidInput, match=r"b: layers.*NaN or infinite"):
        merge_weights(plan_merge(recipe, {**pair, "b": scaled(pair["b"], float("inf"))}), tmp_path / "out")


def test_what_a_killed_merge_left_of_another_derivation_is_not_continued(
    pair: dict[str, Checkpoint], tmp_path: Path
) -> None:
    recipe = load_recipe({"merge_method": "passthrough", "models": [{"model": "b"}]})

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_weights(plan_merge(recipe, {"b": scaled(pair["b"], 2.0)}), tmp_path / "out", before_sealing=killed)
    goes_on = merge_weights(plan_merge(recipe, {"b": scaled(pair["b"], 3.0)}), tmp_path / "out")
    fresh = merge_weights(plan_merge(recipe, {"b": scaled(pair["b"], 3.0)}), tmp_path / "fresh")
    assert goes_on.files == fresh.files

"""Optimizer state that is stored with a merge: its recipe's steps build both moments, and partial state is ignored."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import sampled

from mergegate.merge_core import load_recipe
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints import PinnedRecipe, pin_checkpoints, resolve_parents
from mergegate.tasks.merge import (
    MergeSettings,
    OptimizerState,
    find_optimizer_state,
    merge,
    numerics,
    optimizer_state,
    optimizer_state_paths,
    optimizer_steps,
)
from mergegate.tasks.store import Artifact

TEXT = """
name: round
merge_method: task_arithmetic
base_model: {place}/base
models: [{{model: {place}/a, parameters: {{weight: 1}}}}]
dtype: float32
---
{{name: mean, merge_method: moving_mean, base_model: {place}/base, models: [{{model: round}}], dtype: float32}}
---
{{name: squares, merge_method: moving_squares, base_model: {place}/base, models: [{{model: round}}], dtype: float32}}
---
merge_method: adam
base_model: {place}/base
models: [{{model: mean}}, {{model: squares}}]
parameters: {{rate: 0.01}}
"""
DAMAGED = ("mean/model.safetensors", "squares/config.json", "manifest.json")
ABOUT = (("README.md", "---\nlicense: mit\n---\n"), ("licenses/mit.txt", "terms"))


def save(place: Path, weights: np.ndarray) -> None:
    place.mkdir()
    save_file({"model.norm.weight": torch.from_numpy(weights.astype(np.float32))}, place / "model.safetensors")
    (place / "config.json").write_text('{"model_type": "llama"}')


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedRecipe:
    """Return a first Adam round with one model; half of the weights do not change."""
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "home"))
    draw = np.random.default_rng(0)
    base = draw.normal(size=40)
    save(tmp_path / "base", base)
    save(tmp_path / "a", base + np.where(np.arange(40) < 20, 0, draw.normal(size=40)))
    recipe = load_recipe(TEXT.format(place=tmp_path))
    return PinnedRecipe(recipe, pin_checkpoints(resolve_parents(recipe), HashMemo(tmp_path / "hashes.db")))


def kept(pinned: PinnedRecipe) -> Artifact[OptimizerState]:
    return optimizer_state.build(pinned, numerics(MergeSettings(device="cpu")), ABOUT)


def weights(place: Path) -> np.ndarray:
    return load_file(place / "model.safetensors")["model.norm.weight"].double().numpy()


def test_each_state_has_the_files_of_a_model(pinned: PinnedRecipe, tmp_path: Path) -> None:
    assert optimizer_steps(pinned) == ("mean", "squares")
    found = optimizer_state_paths(kept(pinned))
    change = weights(tmp_path / "a") - weights(tmp_path / "base")
    np.testing.assert_allclose(weights(found["mean"][1]), 0.1 * change, atol=1e-7)
    np.testing.assert_allclose(weights(found["squares"][1]), 0.01 * change**2, atol=1e-7)
    for _, place in found.values():
        assert (place / "licenses/mit.txt").read_text() == "terms"
        assert (place / "README.md").is_file()


def test_a_state_is_found_by_its_name_in_the_provenance(pinned: PinnedRecipe) -> None:
    for stored, place in optimizer_state_paths(kept(pinned)).values():
        assert find_optimizer_state(stored) == place
        assert find_optimizer_state(stored.rpartition("/")[0] + "/another") is None


@pytest.mark.parametrize("what", sampled(DAMAGED, DAMAGED[:1]))
def test_a_damaged_file_invalidates_the_state(pinned: PinnedRecipe, what: str) -> None:
    made = kept(pinned)
    before = {file: file.read_bytes() for file in made.directory.rglob("*.safetensors")}
    (made.directory / what).write_bytes(b"{}")
    assert [find_optimizer_state(stored) for stored, _ in optimizer_state_paths(made).values()] == [None, None]
    assert kept(pinned).digest == made.digest
    assert {file: file.read_bytes() for file in made.directory.rglob("*.safetensors")} == before


def test_leftovers_of_a_killed_run_change_nothing(pinned: PinnedRecipe) -> None:
    made = kept(pinned)
    half = made.directory.with_name(f"{made.directory.name}.partial")
    made.directory.rename(half)
    shutil.rmtree(half / "squares")
    (half / "manifest.json").unlink()
    (half / "mean/model.safetensors").write_bytes(b"half of it")
    (half / "squares").write_text("in the way")
    assert kept(pinned).digest == made.digest


def test_states_get_no_finding_about_their_size(pinned: PinnedRecipe) -> None:
    said = merge.build(pinned, numerics(MergeSettings(device="cpu"))).value.warnings
    assert not [warning for warning in said if "large" in warning]

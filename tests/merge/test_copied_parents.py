"""A merge with the weights of a parent is found, up to rounding; any other merge is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.merge import find_copied_parent

pytestmark = pytest.mark.usefixtures("own_store")
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def changed(model: Model, directory: Path, change: Change) -> Model:
    """Return a copy of a model with changed weights."""
    shutil.copytree(model.directory, directory)
    weights = change(load_file(directory / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return Model(name=directory.name, digest=f"{directory}", directory=directory)


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda weights: {name: change(tensor) for name, tensor in weights.items()}


def last_element(weights: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    name = max(weights)
    weights[name].view(-1)[-1] += by * weights[name].abs().max()
    return weights


COPIES: dict[str, Change] = {
    "same bytes": each(lambda tensor: tensor),
    "sums in another order": each(lambda tensor: (tensor + 0.3) - 0.3),
    "negative zeros": each(lambda tensor: torch.where(tensor == 0, -0.0, tensor)),
    "rounded to bfloat16": each(lambda tensor: tensor.bfloat16()),
    "rounded to float16": each(lambda tensor: tensor.half()),
    "in float64": each(lambda tensor: tensor.double()),
}
OTHERS: dict[str, Change] = {
    "a hundredth of a task vector": each(lambda tensor: tensor * 1.0001),
    "one number differs": lambda weights: last_element(weights, 1e-3),
    "one layer fewer": lambda weights: {name: tensor for name, tensor in weights.items() if "layers.1." not in name},
    "another vocabulary": lambda weights: {
        name: torch.cat([tensor, tensor[:1]]) if "embed" in name or "lm_head" in name else tensor
        for name, tensor in weights.items()
    },
}


@pytest.mark.parametrize("change", COPIES.values(), ids=COPIES)
def test_a_merge_with_the_weights_of_a_parent_is_a_copy(tmp_path: Path, change: Change) -> None:
    first, second = (make_model(tmp_path / f"parent{seed}", seed=seed) for seed in range(2))
    merge = changed(second, tmp_path / "merge", change)
    assert find_copied_parent.build(merge, (first, second)).value.parent == 1


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_merge_with_other_weights_is_not_a_copy(tmp_path: Path, change: Change) -> None:
    parent = make_model(tmp_path / "parent")
    assert find_copied_parent.build(changed(parent, tmp_path / "merge", change), (parent,)).value.parent is None


def test_a_small_change_of_bfloat16_weights_is_not_rounding(tmp_path: Path) -> None:
    """A fine-tune may move each weight by no more than the last bit of bfloat16."""
    parent = make_model(tmp_path / "parent", dtype=torch.bfloat16)
    moved = changed(parent, tmp_path / "merge", each(lambda tensor: (tensor.float() * 1.004).bfloat16()))
    assert find_copied_parent.build(moved, (parent,)).value.parent is None

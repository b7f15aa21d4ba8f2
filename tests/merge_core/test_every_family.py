"""The table of all families in ``families.json`` names every family of transformers, and its cells are true."""

from __future__ import annotations

from pathlib import Path

import every_family
import pytest
import torch
from every_family import COMMAND, NOT_TRIED, WRONG, Row, build, class_of, known_trial, row_of, rows, tried
from family import LINEAR, check_recipe, merge_text
from family_table import read_table
from safetensors.torch import load_file, save_file
from samples import sampled

from mergegate.merge_core.errors import InvalidInput

# An encoder, a model with pictures, an encoder-decoder that computes its positions, and families without a description.
SAMPLE = ("albert", "biogpt", "marian", "dinov2", "qwen3_vl", "hubert")


def test_the_table_names_every_family_of_the_installed_transformers() -> None:
    missing = sorted({*every_family.families(), *every_family.parts()} - {*rows(), *read_table("parts")})
    assert missing == [], f"run {COMMAND} to add the families to families.json"


def test_kinds_evaluation_and_detailed_trials_in_the_table_are_current() -> None:
    for name, row in rows().items():
        if name in every_family.families():
            trial = known_trial(name) or every_family.Trial(row.whole, row.slices, row.adapters)
            assert row == row_of(name, trial, row), f"run {COMMAND} to refresh families.json"


def test_no_trial_has_a_wrong_result() -> None:
    assert [name for name, row in rows().items() if WRONG in row] == []


def test_most_families_are_tried() -> None:
    untried = [name for name, row in rows().items() if row.whole.startswith(NOT_TRIED)]
    assert len(untried) < len(rows()) / 8


@pytest.mark.story
@pytest.mark.parametrize("name", sampled(every_family.families(), SAMPLE, pytest.mark.proof))
def test_trials_repeat_the_cells_of_a_family(name: str, tmp_path: Path) -> None:
    row: Row = rows()[name]
    if known_trial(name) is None:
        assert tried(name, tmp_path) == (row.whole, row.slices, row.adapters)


TRAINED = ("resnet", "regnet", "levit", "mobilenet_v1", "mobilenet_v2", "mobilevit", "swiftformer")


@pytest.mark.story
@pytest.mark.parametrize("name", sampled(TRAINED, ("resnet", "mobilenet_v2"), pytest.mark.proof))
def test_counters_of_trained_networks_are_those_of_the_first_model(name: str, tmp_path: Path) -> None:
    for model, steps in (("a", 2), ("b", 3)):
        network = build(name, class_of(name)).train()  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        for _ in range(steps):
            size = getattr(network.config, "image_size", 64)
            network(pixel_values=torch.rand(2, 3, size, size)).logits.square().mean().backward()
            optimizer.step()
        network.save_pretrained(tmp_path / model)
    assert [one for one in check_recipe(LINEAR, tmp_path).findings if one.severity == "block"] == []
    merge_text(LINEAR, tmp_path)
    merged, first = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "a"))
    counters = [counter for counter, tensor in first.items() if not tensor.is_floating_point() and tensor.dim() == 0]
    assert counters
    assert all(merged[counter] == first[counter] == 2 for counter in counters)
    # A table of integers has a meaning. Check and merge refuse different ones.
    for model, number in (("a", 1), ("b", 2)):
        file = tmp_path / model / "model.safetensors"
        save_file({**load_file(file), "table": torch.tensor([0, number])}, file, {"format": "pt"})
    blocking = [one for one in check_recipe(LINEAR, tmp_path).findings if one.severity == "block"]
    assert [one.where for one in blocking] == ["b: table"]
    with pytest.raises(InvalidInput, match="b: table: I64 numbers that differ from those of a"):
        merge_text(LINEAR, tmp_path, "out-2")

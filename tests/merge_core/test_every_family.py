"""The table of all families in ``docs/families.md`` names every family of transformers, and its cells are true."""

from __future__ import annotations

from pathlib import Path

import every_family
import pytest
from every_family import COMMAND, NOT_TRIED, WRONG, Row, known_trial, row_of, rows, tried
from samples import sampled

# An encoder, a model with pictures, an encoder-decoder that computes its positions, and families without a description.
SAMPLE = ("albert", "biogpt", "marian", "dinov2", "qwen3_vl", "hubert")


def test_the_table_names_every_family_of_the_installed_transformers() -> None:
    missing = sorted({*every_family.families(), *every_family.parts()} - {*rows(), *every_family.named_parts()})
    assert missing == [], f"run {COMMAND} to add the families to docs/families.md"


def test_kinds_evaluation_and_detailed_trials_in_the_table_are_current() -> None:
    for name, row in rows().items():
        if name in every_family.families():
            trial = known_trial(name) or every_family.Trial(row.whole, row.slices, row.adapters)
            assert row == row_of(name, trial, row), f"run {COMMAND} to refresh docs/families.md"


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

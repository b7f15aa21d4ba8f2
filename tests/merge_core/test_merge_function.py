"""``merge_core.merge`` merges local checkpoints into a new directory in one call."""

from __future__ import annotations

from pathlib import Path

import pytest
from family import random_tensors, recipe_of, save_checkpoint

from mergegate import merge_core
from mergegate.merge_core import load_recipe, merge, merge_methods, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.errors import InvalidInput, Refused


@pytest.fixture
def recipe_file(family: Path) -> Path:
    file = family / "ties.yaml"
    file.write_text(recipe_of("ties"))
    return file


def test_dir_lists_every_public_name() -> None:
    assert set(merge_core.__all__) <= set(dir(merge_core))
    assert all(getattr(merge_core, name) is not None for name in dir(merge_core))


def test_merge_writes_what_the_single_steps_write(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file)
    plan = plan_merge(recipe, {str(ref): open_checkpoint(tmp_path / ref.path) for ref in recipe.references()})
    expected = merge_weights(plan, tmp_path / "expected", seed=3, device="cpu")
    progress: list[tuple[int, int]] = []
    record = merge(recipe_file, tmp_path / "out", seed=3, device="cpu", on_progress=lambda *done: progress.append(done))
    assert record.files == expected.files
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(record.files)
    assert progress[-1] == (record.bytes_written, record.bytes_written)


def test_merge_accepts_paths_as_text_and_recipes(recipe_file: Path, tmp_path: Path) -> None:
    by_text = merge(str(recipe_file), str(tmp_path / "by-text"), device="cpu")
    assert merge(load_recipe(recipe_file), tmp_path / "by-recipe", device="cpu").files == by_text.files


def test_merge_does_not_overwrite_a_directory(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="exists"):
        merge(recipe_file, tmp_path / "a", device="cpu")


def test_models_that_do_not_fit_leave_no_directory(recipe_file: Path, tmp_path: Path) -> None:
    wider = save_checkpoint(tmp_path / "wider", random_tensors(0, layers=2))
    recipe_file.write_text(recipe_file.read_text().replace("model: a", f"model: {wider}"))
    with pytest.raises(Refused, match="2 layers instead of 3"):
        merge(recipe_file, tmp_path / "out", device="cpu")
    assert not list(tmp_path.glob("out*"))


def test_a_model_on_the_hub_is_refused_with_the_command_that_merges_it(recipe_file: Path, tmp_path: Path) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("model: a", "model: org/name"))
    with pytest.raises(InvalidInput, match="mergegate merge"):
        merge(recipe_file, tmp_path / "out")


def test_recipes_that_need_measurements_are_refused_before_anything_is_written(tmp_path: Path, family: Path) -> None:
    file = family / "recipe.yaml"
    refused = []
    for method in sorted(merge_methods()):
        file.write_text(recipe_of(method))
        recipe = load_recipe(file)
        if recipe.needs_distances or recipe.texts:
            refused.append(method)
            with pytest.raises(InvalidInput, match="measure first"):
                merge(file, tmp_path / "out", device="cpu")
            assert not list(tmp_path.glob("out*"))
    assert refused

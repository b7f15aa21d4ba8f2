"""Candidate recipes of a profile: its own recipe, then its remedies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mergegate.flows.candidates import candidate_recipes
from mergegate.merge_core.errors import InvalidInput

LINEAR: dict[str, Any] = {
    "merge_method": "linear",
    "models": [{"model": "a", "parameters": {"weight": 0.5}}, {"model": "b", "parameters": {"weight": 0.5}}],
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "linear.yaml").write_text(yaml.safe_dump(LINEAR))
    return Path("recipes/linear.yaml")


def test_a_remedy_may_change_the_recipe_or_be_another_one(tmp_path: Path, recipe: Path) -> None:
    (tmp_path / "slerp.yaml").write_text(
        "merge_method: slerp\nmodels: [{model: a}, {model: b}]\nparameters: {t: 0.5}\n"
    )
    found = candidate_recipes(
        recipe,
        [
            {"merge_method": "ties", "base_model": "base", "density": 0.5},
            Path("slerp.yaml"),
            {**LINEAR, "dtype": "float32"},
        ],
        tmp_path,
        "profile x",
    )
    assert [candidate.recipe.summary() for candidate in found] == [
        "linear of 2",
        "ties of 2 over base",
        "slerp of 2",
        "linear of 2",
    ]
    assert [candidate.remedy for candidate in found] == [
        "",
        "merge_method: ties, base_model: base, density: 0.5",
        "slerp.yaml",
        "another recipe",
    ]


def test_a_changed_recipe_finds_its_models_where_the_first_one_does(tmp_path: Path, recipe: Path) -> None:
    first, second = candidate_recipes(recipe, [{"dtype": "float32"}], tmp_path, "profile x")
    assert first.recipe.directory == second.recipe.directory == tmp_path / "recipes"


def test_the_text_is_the_recipe_that_was_tried(tmp_path: Path, recipe: Path) -> None:
    first, second = candidate_recipes(recipe, [{"weight": 1.0}], tmp_path, "profile x")
    assert first.text == (tmp_path / recipe).read_text()
    assert yaml.safe_load(second.text) == {
        "merge_method": "linear",
        "models": [{"model": "a"}, {"model": "b"}],
        "parameters": {"weight": 1.0},
    }


def test_a_misspelt_remedy_says_which_one(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(InvalidInput, match=r"profile x: remedies\[1\]"):
        candidate_recipes(recipe, [{"dtype": "float32"}, {"wieght": 1}], tmp_path, "profile x")


def test_several_documents_cannot_be_changed_in_part(tmp_path: Path) -> None:
    documents = [{"name": "one", **LINEAR}, {**LINEAR, "models": [{"model": "one", "parameters": {"weight": 1}}]}]
    (tmp_path / "steps.yaml").write_text(yaml.safe_dump_all(documents))
    with pytest.raises(InvalidInput, match="changes of a recipe with several documents"):
        candidate_recipes(Path("steps.yaml"), [{"dtype": "float32"}], tmp_path, "profile x")

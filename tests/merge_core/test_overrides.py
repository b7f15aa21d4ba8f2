"""A recipe with overridden settings equals the same recipe written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe.overrides import apply_overrides

TIES: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "base",
    "models": [
        {"model": "a", "parameters": {"weight": 0.6, "density": [0.5, 0.9]}},
        {"model": "b", "parameters": {"weight": 0.4}},
    ],
    "parameters": {"normalize": False, "density": 0.7},
    "dtype": "bfloat16",
}
LINEAR: dict[str, Any] = {
    "merge_method": "linear",
    "models": [{"model": "a", "parameters": {"weight": 1}}, {"model": "b"}],
}


def test_a_parameter_has_its_new_value_for_every_model() -> None:
    assert apply_overrides(TIES, {"density": 0.3}, "r") == {
        **TIES,
        "models": [{"model": "a", "parameters": {"weight": 0.6}}, {"model": "b", "parameters": {"weight": 0.4}}],
        "parameters": {"normalize": False, "density": 0.3},
    }


def test_another_method_keeps_only_the_parameters_that_it_has() -> None:
    assert apply_overrides(TIES, {"merge_method": "linear", "dtype": "float32"}, "r") == {
        "merge_method": "linear",
        "base_model": "base",
        "models": [{"model": "a", "parameters": {"weight": 0.6}}, {"model": "b", "parameters": {"weight": 0.4}}],
        "dtype": "float32",
    }


@pytest.mark.parametrize("method", ["ties", "dare_ties", "della", "breadcrumbs", "consensus_ta"])
def test_another_method_does_not_inherit_the_scale(method: str) -> None:
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "models": [{"model": "a", "parameters": {"weight": 0.6, "lambda": 2.0}}, {"model": "b"}],
        "parameters": {"lambda": 0.22, "normalize": False, "weight": 0.5},
    }
    changed = apply_overrides(recipe, {"merge_method": method}, "r")
    assert changed["models"] == [{"model": "a", "parameters": {"weight": 0.6}}, {"model": "b"}]
    assert changed["parameters"] == {"weight": 0.5}
    assert apply_overrides(recipe, {"merge_method": method, "lambda": 0.8}, "r")["parameters"]["lambda"] == 0.8
    assert apply_overrides(recipe, {"weight": 1.0}, "r")["parameters"]["lambda"] == 0.22


def test_a_base_can_be_added_for_a_method_that_needs_one() -> None:
    changed = apply_overrides(LINEAR, {"merge_method": "ties", "base_model": "base", "weight": 1, "density": 0.5}, "r")
    recipe = load_recipe(changed)
    assert recipe.summary() == "ties of 2 over base"
    assert changed["models"] == [{"model": "a"}, {"model": "b"}]


def test_texts_and_distance_rules_are_removed_if_the_method_does_not_use_them() -> None:
    models = [{"model": "a", "text": "a.jsonl"}, {"model": "b", "text": "b.jsonl"}]
    regmean = {"merge_method": "regmean", "base_model": "base", "models": models, "leave_out_beyond": 5}
    regmean["statistics"] = {"documents": 9}
    plain = {"models": [{"model": "a"}, {"model": "b"}]}
    changed = apply_overrides(regmean, {"merge_method": "ties", "weight": 1.0}, "r")
    assert changed == {
        **plain,
        "merge_method": "ties",
        "base_model": "base",
        "leave_out_beyond": 5,
        "parameters": {"weight": 1.0},
    }
    assert apply_overrides(regmean, {"off_diagonals": 0.5}, "r")["models"] == models
    linear = apply_overrides(regmean, {"merge_method": "linear", "weight": 1.0}, "r")
    assert linear == {**plain, "merge_method": "linear", "base_model": "base", "parameters": {"weight": 1.0}}
    based = apply_overrides(regmean, {"base_model": "a", "off_diagonals": 0.5}, "r")
    load_recipe(apply_overrides({**regmean, "merge_method": "regmean"}, {"off_diagonals": 0.5}, "r"))
    assert based["base_model"] == "a"
    for one in (changed, linear):
        load_recipe(one)


def test_parameters_may_be_written_as_in_a_recipe() -> None:
    assert apply_overrides(TIES, {"parameters": {"density": 0.3}}, "r") == apply_overrides(TIES, {"density": 0.3}, "r")


def test_models_can_be_removed_or_reweighted() -> None:
    models = [{"model": "b", "parameters": {"weight": 1.5}}]
    changed = apply_overrides(TIES, {"models": models, "density": 0.2}, "r")
    assert changed["models"] == models
    assert changed["parameters"] == {"normalize": False, "density": 0.2}


def test_a_model_that_becomes_the_base_has_no_weight_of_its_own() -> None:
    recipe = {**LINEAR, "models": [*LINEAR["models"], {"model": "base", "parameters": {"weight": 1}}]}
    changed = apply_overrides(recipe, {"merge_method": "ties", "base_model": "base", "density": 0.5}, "r")
    assert changed["models"][-1] == {"model": "base"}


def test_overrides_do_not_modify_the_original_recipe() -> None:
    before = load_recipe(TIES).canonical()
    apply_overrides(TIES, {"density": 0.1, "dtype": "float32"}, "r")
    assert load_recipe(TIES).canonical() == before


def test_a_misspelt_change_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidInput, match=r"(?s)remedies\[0\].*'densty'.*density"):
        apply_overrides(TIES, {"densty": 0.3}, "remedies[0]")


def test_a_parameter_of_another_method_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a parameter of linear"):
        apply_overrides(LINEAR, {"density": 0.3}, "remedies[0]")


def test_empty_changes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no changes"):
        apply_overrides(TIES, {}, "remedies[0]")

"""Test the conversion of mergekit-evolve's YAML to a profile with a sweep."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe import load_recipe
from mergegate.tasks.sweep import SweepSettings, convert_evolve_file, make_objective, make_space

WHOLE = """
genome:
  models: [org/math, org/code]
  merge_method: dare_ties
  base_model: org/base
  tokenizer_source: base
  layer_granularity: 8
  normalize: false
  allow_negative_weights: true
  smooth: true
  filters: [self_attn, mlp]
tasks:
  - {name: gsm8k, weight: 0.7, metric: "exact_match,strict-match"}
  - {name: arc_challenge, weight: 0.3}
  - {name: winogrande, weight: -0.1}
limit: 150
num_fewshot: 4
shuffle: true
random_init: true
apply_chat_template: true
fewshot_as_multiturn: true
"""


def converted(text: str = WHOLE, layers: int | None = 32, **more: Any) -> Any:
    return convert_evolve_file({**yaml.safe_load(text), **more}, "evolved", "evolve.yaml", layers)


def test_a_complete_file_becomes_a_valid_profile() -> None:
    profile, unsupported = converted()
    assert yaml.safe_load(yaml.safe_dump(profile)) == profile
    settings = SweepSettings.model_validate(profile["sweep"])
    space = make_space(profile["recipe"], settings, 32, "recipe")
    assert len(space.coordinates) == 2 * 2 * 4 * 3  # models, parameters, layer groups, filters (with the rest)
    recipe = load_recipe(yaml.safe_dump(space.fill_recipe(space.start)))
    assert recipe.merge_method == "dare_ties"
    assert settings.parameters["weight_1"].start == 0.5
    assert settings.parameters["weight_1"].low == -1
    assert settings.parameters["density_2"].start == 1
    assert settings.documents.search == 150
    assert settings.documents.confirmation == 300
    tasks = {"gsm8k": "gsm8k", "arc_challenge": "arc_challenge"}
    weights = make_objective(settings, tasks).weights
    assert {key.metric: round(weight, 9) for key, weight in weights.items()} == {
        "exact_match,strict-match": 0.7,
        "acc,none": 0.3,
    }
    assert profile["evaluate"]["num_fewshot"] == 4
    assert profile["evaluate"]["chat_template"] is True
    rest = {**profile, "recipe": space.fill_recipe(space.start)}
    Profile.model_validate({name: value for name, value in rest.items() if name != "sweep"})
    assert [one.setting for one in unsupported] == [
        "genome.smooth", "random_init", "shuffle", "fewshot_as_multiturn", "tasks: winogrande: weight -0.1",
    ]  # fmt: skip
    assert all(one.reason for one in unsupported)


@pytest.mark.parametrize(
    ("method", "dimensions"), [("linear", 2), ("task_arithmetic", 2), ("ties", 4), ("dare_ties", 4), ("slerp", 1)]
)
def test_every_method_of_mergekit_evolve_is_supported(method: str, dimensions: int) -> None:
    genome = {"models": ["a", "b"], "merge_method": method, "base_model": "a" if method == "slerp" else "base"}
    profile, unsupported = convert_evolve_file({"genome": genome, "tasks": [{"name": "t"}]}, "e", "evolve.yaml")
    settings = SweepSettings.model_validate(profile["sweep"])
    space = make_space(profile["recipe"], settings, None, "recipe")
    assert len(space.coordinates) == dimensions
    assert load_recipe(yaml.safe_dump(space.fill_recipe(space.start))).merge_method == method
    assert [one.setting for one in unsupported] == (["genome.base_model"] if method == "linear" else [])


def test_layer_groups_need_the_number_of_layers() -> None:
    profile, unsupported = converted(layers=None)
    assert "layers" not in profile["sweep"]["parameters"]["weight_1"]
    assert any("layer_granularity" in one.setting for one in unsupported)
    assert converted(layers=30).profile["sweep"]["parameters"]["weight_1"]["layers"] == 4
    assert any("not divisible" in one.reason for one in converted(layers=30).unsupported)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"genome": {}}, "genome: {}"),
        ({"genom": {}}, "did you mean 'genome'"),
        ({"genome": {"models": ["a"], "merge_methd": "ties"}}, "did you mean 'merge_method'"),
        ({"genome": {"models": [], "merge_method": "ties"}}, "a list of model names"),
        ({"genome": {"models": ["a"], "merge_method": "tie", "base_model": "b"}}, "did you mean 'ties'"),
        ({"genome": {"models": ["a"], "merge_method": "ties"}}, "base_model: nothing"),
        ({"genome": {"models": ["a"], "merge_method": "linear"}}, "tasks: None"),
        ({"genome": {"models": ["a"], "merge_method": "linear"}, "tasks": [{"nme": "x"}]}, "did you mean 'name'"),
        ({"genome": {"models": ["a"], "merge_method": "linear"}, "tasks": [{"name": "x", "weight": "1"}]}, "a number"),
        ({"genome": {"models": ["a"], "merge_method": "linear"}, "tasks": [{"name": "x", "weight": -1}]}, "above zero"),
    ],
)
def test_invalid_files_are_rejected_with_the_location_of_the_error(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        convert_evolve_file(content, "e", "evolve.yaml")
    assert re.search(message, str(caught.value)), str(caught.value)

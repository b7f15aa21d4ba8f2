"""Free parameters of a recipe become coordinates, and a point becomes a recipe that reads like one written by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_search import TIES, TIES_PARAMETERS, WEIGHT, space_of, ties_space

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe import load_recipe, value_for
from mergegate.tasks.sweep.space import project_to_sum_one, recipe_key

UNITS = st.floats(-0.5, 1.5)
LINEAR = {"merge_method": "linear", "models": [{"model": "math", "parameters": {"weight": "$w"}}, {"model": "code"}]}
MODELS = [{"model": "math", "parameters": {"weight": "$math"}}, {"model": "code", "parameters": {"weight": "$code"}}]
BOTH = {**LINEAR, "models": MODELS}


def read(recipe: dict[str, Any]) -> Any:
    return load_recipe(yaml.safe_dump(recipe))


def test_the_start_is_the_hand_written_recipe() -> None:
    models = [{"model": name, "parameters": {"weight": 1.0, "density": 0.5}} for name in ("math", "code")]
    space = ties_space()
    assert space.fill_recipe(space.start) == {**TIES, "models": models}
    assert space.recipe["models"][0]["parameters"]["weight"] == "$math"


@settings(max_examples=25)
@given(unit=st.tuples(UNITS, UNITS, UNITS))
def test_every_point_is_a_recipe_within_its_ranges_and_survives_yaml(unit: tuple[float, ...]) -> None:
    space = ties_space()
    point = space.decode(unit)
    for name, free in TIES_PARAMETERS.items():
        assert free["low"] <= point[name] <= free["high"]
        assert point[name] == round(point[name], 4)
    recipe = space.fill_recipe(point)
    assert yaml.safe_load(yaml.safe_dump(recipe)) == recipe
    assert recipe_key(space.fill_recipe(space.decode(space.encode(point)))) == recipe_key(recipe)


@pytest.mark.parametrize(
    "free",
    [
        {"type": "log", "low": 1e-6, "high": 10, "start": 0.01},
        {"type": "float", "low": 0, "high": 1e-3, "start": 5e-4},
        {"type": "integer", "low": -3, "high": 7, "start": 2},
        {"type": "category", "choices": [0.1, "x", True, 1], "start": 1},
    ],
)
def test_decoding_inverts_encoding(free: dict[str, Any]) -> None:
    space = space_of({"merge_method": "linear", "models": ["$x"]}, {"x": free}, layers=None)
    assert space.decode(space.encode(space.start)) == space.start
    drawn = {repr(space.decode([u])["x"]) for u in np.linspace(0, 1, 2001)}
    assert len(drawn) == {"log": len(drawn), "float": len(drawn), "integer": 11, "category": 4}[free["type"]]
    assert len(drawn) >= 4
    for u in np.linspace(0, 1, 101):
        point = space.decode([u])
        assert space.decode(space.encode(point)) == point


def test_layer_groups_become_one_value_per_layer() -> None:
    space = space_of(LINEAR, {"w": {**WEIGHT, "layers": 2}}, layers=5)
    recipe = space.fill_recipe({"w[0]": 0.5, "w[1]": 1.5})
    assert recipe["models"][0]["parameters"]["weight"] == [0.5, 0.5, 0.5, 1.5, 1.5]
    read_back = read({**recipe, "models": [recipe["models"][0], {"model": "code", "parameters": {"weight": 1}}]})
    weight = read_back.method.parameter("weight")
    per_layer = [value_for(weight, [read_back.sources[0].parameters], "x", layer / 4) for layer in range(5)]
    assert per_layer == pytest.approx([0.5, 0.5, 0.5, 1.5, 1.5], abs=1e-12)


def test_filters_become_a_list_that_ends_with_all_other_tensors() -> None:
    space = space_of(LINEAR, {"w": {**WEIGHT, "filters": ["self_attn", "mlp"], "layers": 2}}, layers=2)
    assert [one.name for one in space.coordinates] == [
        "w[self_attn:0]", "w[self_attn:1]", "w[mlp:0]", "w[mlp:1]", "w[*:0]", "w[*:1]",
    ]  # fmt: skip
    point = {one.name: round(0.2 + 0.1 * i, 1) for i, one in enumerate(space.coordinates)}
    assert space.fill_recipe(point)["models"][0]["parameters"]["weight"] == [
        {"filter": "self_attn", "value": [0.2, 0.3]},
        {"filter": "mlp", "value": [0.4, 0.5]},
        {"value": [0.6, 0.7]},
    ]


def test_a_placeholder_can_replace_any_value() -> None:
    weight = [{"filter": "mlp", "value": "$w"}, 1.0]
    recipe = {
        **{"merge_method": "$how", "base_model": "base", "parameters": {"lambda": 0.9}},
        "models": [
            {"model": "$which", "parameters": {"weight": weight, "density": 0.5}},
            {"model": "code", "parameters": {"weight": 0.5, "density": 0.5}},
        ],
    }
    parameters = {
        "how": {"type": "category", "choices": ["ties", "linear"], "start": "ties"},
        "which": {"type": "category", "choices": ["math", "law"], "start": "math"},
        "w": {**WEIGHT, "layers": 2},
    }
    space = space_of(recipe, parameters)
    ties = space.fill_recipe({"how": "ties", "which": "law", "w[0]": 0.3, "w[1]": 0.4})
    assert ties["models"][0]["model"] == "law"
    assert ties["models"][0]["parameters"]["weight"][0] == {"filter": "mlp", "value": [0.3, 0.3, 0.4, 0.4]}
    linear = space.fill_recipe({"how": "linear", "which": "law", "w[0]": 0.3, "w[1]": 0.4})
    assert "parameters" not in linear
    assert all("density" not in model["parameters"] for model in linear["models"])
    assert read(ties).merge_method == "ties"
    assert read(linear).merge_method == "linear"


def test_parameters_that_a_method_lacks_do_not_change_the_recipe() -> None:
    recipe = {"merge_method": "$how", "base_model": "base", "parameters": {"density": "$d", "weight": 1}}
    how = {"type": "category", "choices": ["ties", "linear"], "start": "ties"}
    space = space_of({**recipe, "models": ["math"]}, {"how": how, "d": {"low": 0, "high": 1, "start": 0.5}})
    one, other = (recipe_key(space.fill_recipe({"how": "linear", "d": density})) for density in (0.1, 0.9))
    assert one == other


@settings(max_examples=25)
@given(unit=st.tuples(*[UNITS] * 6))
def test_weights_sum_to_one_in_every_group_and_keep_their_ranges(unit: tuple[float, ...]) -> None:
    free = {"low": 0.1, "high": 0.7, "start": 0.3, "layers": 2}
    models = [{"model": f"m{i}", "parameters": {"weight": f"$w{i}"}} for i in range(3)]
    parameters = {"w0": free, "w1": free, "w2": {**free, "start": 0.4}}
    space = space_of({"merge_method": "linear", "models": models}, parameters, sum_to_one=[["w0", "w1", "w2"]])
    point = space.decode(unit)
    for group in range(2):
        values = [float(point[f"w{i}[{group}]"]) for i in range(3)]
        assert sum(values) == pytest.approx(1, abs=1e-12)
        assert all(0.1 <= value <= 0.7 for value in values)
    assert space.decode(space.encode(space.start)) == space.start


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_the_projection_returns_the_nearest_values_that_sum_to_one(values: list[float]) -> None:
    """The result agrees with scipy's general-purpose optimizer."""
    from scipy.optimize import minimize

    found = np.array(project_to_sum_one(values, [(0.0, 1.0)] * len(values)))
    best = minimize(
        lambda x: ((x - np.array(values)) ** 2).sum(),
        np.full(len(values), 1 / len(values)),
        bounds=[(0, 1)] * len(values),
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-12},
    ).x
    assert found == pytest.approx(best, abs=2e-4)


@pytest.mark.parametrize(
    ("recipe", "parameters", "more", "message"),
    [
        (TIES, {"math": WEIGHT, "code": WEIGHT, "densty": WEIGHT}, {}, "not defined.*did you mean 'densty'"),
        (TIES, {**TIES_PARAMETERS, "lamda": WEIGHT}, {}, r"\.lamda: a parameter that the recipe does not use"),
        (LINEAR, {"w": {**WEIGHT, "start": 2}}, {}, r"parameters\.w\.start: 2\n.*from 0.2 to 1.8"),
        (LINEAR, {"w": {"low": 1, "high": 1, "start": 1}}, {}, "low less than high"),
        (LINEAR, {"w": {"low": 1, "start": 1}}, {}, r"w\.high: nothing"),
        (LINEAR, {"w": {"low": 0, "high": float("nan"), "start": 0}}, {}, "low less than high"),
        (LINEAR, {"w": {**WEIGHT, "start": "one"}}, {}, "expected: a number"),
        (LINEAR, {"w": {"type": "log", "low": 0, "high": 1, "start": 0.5}}, {}, "above 0"),
        (LINEAR, {"w": {"type": "integer", "low": 0, "high": 1.5, "start": 1}}, {}, "whole numbers"),
        (LINEAR, {"w": {"type": "integer", "low": 0, "high": 3, "start": 1, "layers": 2}}, {}, "use filters"),
        (LINEAR, {"w": {"type": "category", "start": 1}}, {}, "the choices of the category"),
        (LINEAR, {"w": {"type": "category", "choices": ["ties", "ties"], "start": "ties"}}, {}, "choice only once"),
        (LINEAR, {"w": {"type": "category", "choices": ["ties"], "start": "tie"}}, {}, "did you mean 'ties'"),
        (LINEAR, {"w": {**WEIGHT, "choices": [1]}}, {}, "type: category"),
        (LINEAR, {"w": {**WEIGHT, "layers": 9}}, {}, "9 groups for 4 layers"),
        (LINEAR, {"w": {**WEIGHT, "filters": ["mlp", "mlp"]}}, {}, "different parts"),
        ({**LINEAR, "dtype": "$w"}, {"w": {**WEIGHT, "filters": ["mlp"]}}, {}, "r.yaml: dtype: .w, which has a value"),
        ({**LINEAR, "dtype": "$w*2"}, {"w": WEIGHT}, {}, "is the complete value"),
        ({**LINEAR, "$w": 1}, {"w": WEIGHT}, {}, "placeholders only as values"),
        (
            {"merge_method": "$how", "models": ["math"]},
            {"how": {"type": "category", "choices": ["ties", "dare_tie"], "start": "ties"}},
            {},
            r"parameters\.how\.choices.*did you mean 'dare_ties'",
        ),
        (LINEAR, {"w": WEIGHT}, {"sum_to_one": [["w"]]}, "two or more"),
        (LINEAR, {"w": WEIGHT}, {"sum_to_one": [["w", "v"]]}, "'v'"),
        (BOTH, {"math": WEIGHT, "code": WEIGHT}, {"sum_to_one": [["math", "code"]]}, "math, code sum to 2"),
        (
            BOTH,
            {"math": {"low": 0.6, "high": 1, "start": 0.6}, "code": {"low": 0.6, "high": 1, "start": 0.6}},
            {"sum_to_one": [["math", "code"]]},
            "between 1.2 and 2",
        ),
    ],
)  # fmt: skip
def test_invalid_parameters_are_rejected_with_their_location(
    recipe: dict[str, Any], parameters: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        space_of(recipe, parameters, **more)
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)
    assert caught.value.exit_code == 2


def test_a_recipe_is_filled_without_reading_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ties_space().fill_recipe(ties_space().start)["models"][1]["model"] == "code"

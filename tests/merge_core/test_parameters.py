"""Filters, gradients and scopes follow mergekit's definitions, and overridden settings equal those written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core import load_recipe, merge_methods
from mergegate.merge_core.errors import FindingLog, InvalidInput
from mergegate.merge_core.methods.contract import REQUIRED, Method, Parameter
from mergegate.merge_core.methods.registry import find_method
from mergegate.merge_core.recipe import apply_overrides
from mergegate.merge_core.recipe.parameters import Parameters, gradient, parse_parameters, value_for

TIES = find_method("ties", "test")
WEIGHT = TIES.parameter("weight")
assert WEIGHT is not None


def parse(content: Any, *, per_model: bool = False, **kw: Any) -> Parameters:
    log = FindingLog()
    parameters = parse_parameters(content, TIES, "r.yaml: parameters", log, per_model=per_model, **kw)
    log.raise_faults("r.yaml")
    return parameters


def warnings(content: Any, **kw: Any) -> str:
    log = FindingLog()
    parse_parameters(content, TIES, "r.yaml: parameters", log, **kw)
    assert log.findings
    assert not log.blocks
    assert all(finding.where.startswith("r.yaml: parameters") for finding in log.findings)
    return "\n".join(f"{finding.found} {finding.expected} {finding.remedy}" for finding in log.findings)


def weight(content: Any, tensor: str = "x", t: float = 0.0, *wider: Any) -> Any:
    return value_for(WEIGHT, [parse({"weight": content}), *map(parse, wider)], tensor, t)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=7), st.floats(0, 1))
def test_a_gradient_is_piecewise_linear(values: list[float], t: float) -> None:
    expected = np.interp(t, np.linspace(0, 1, len(values)), values) if len(values) > 1 else values[0]
    assert gradient(tuple(values), t) == pytest.approx(expected, abs=1e-9)


MLP_FIRST = [{"filter": "mlp", "value": 1}, {"filter": "up", "value": 2}, {"value": 3}]


@pytest.mark.parametrize(
    ("setting", "tensor", "t", "wider", "value"),
    [
        (MLP_FIRST, "layers.0.mlp.up", 0.0, (), 1), (MLP_FIRST, "up_proj", 0.0, (), 2), (MLP_FIRST, "norm", 0.0, (), 3),
        ({"filter": "mlp", "value": 1}, "norm", 0.0, ({"weight": 5},), 5),
        ({"filter": "mlp", "value": 1}, "norm", 0.0, (), REQUIRED),
        ({"filter": "*", "value": 4}, "anything", 0.0, (), 4),
        ([{"filter": "mlp", "value": [0, 1]}, {"value": 9}], "mlp", 0.25, (), 0.25), ("1e-5", "x", 0.0, (), 1e-5),
        ([], "x", 0.0, ({"weight": 5},), 5),
    ],
)  # fmt: skip
def test_the_first_matching_filter_counts_then_the_next_scope_then_the_default(
    setting: Any, tensor: str, t: float, wider: tuple[Any, ...], value: Any
) -> None:
    assert weight(setting, tensor, t, *wider) == value


def test_a_list_of_booleans_steps_instead_of_interpolating() -> None:
    normalize = TIES.parameter("normalize")
    assert normalize is not None
    scopes = [parse({"normalize": [True, False]})]
    assert [value_for(normalize, scopes, "x", t) for t in (0.0, 0.9, 1.0)] == [True, True, False]


def test_a_whole_number_that_becomes_a_fraction_between_layers_is_refused() -> None:
    steps = Parameter("steps", "int", "shared", 1, "")
    method = TIES.__class__("m", "", "", "ordinary", (1, None), (steps,), TIES.steps)
    scope = parse_parameters({"steps": [1, 2]}, method, "here", FindingLog(), per_model=False)
    assert value_for(steps, [scope], "x", 1.0) == 2
    with pytest.raises(InvalidInput, match="whole number"):
        value_for(steps, [scope], "x", 0.5)


COUNTS = [(method, one) for method in merge_methods().values() for one in method.parameters if one.kind == "int"]


@pytest.mark.parametrize(("method", "parameter"), COUNTS, ids=lambda item: item.name)
def test_a_whole_number_that_does_not_fit_into_32_bits_is_refused(method: Method, parameter: Parameter) -> None:
    def read(value: Any) -> Any:
        log, is_own = FindingLog(), parameter.scope != "shared"
        parameters = parse_parameters({parameter.name: value}, method, "p", log, per_model=is_own)
        log.raise_faults("p")
        return value_for(parameter, [parameters], "x", 0.0)

    for sign in (1, -1):
        for size in (2**31, 2**31 + 0.0, 2**63, 1e30, "1e30", "9" * 5000, 10**400):
            value = f"-{size}" if isinstance(size, str) and sign < 0 else size * sign if sign < 0 else size
            for content in (value, [1, value], {"filter": "x", "value": value}):
                with pytest.raises(InvalidInput, match="expected"):
                    read(content)
    largest = 2**31 - 1 if parameter.maximum is None else int(parameter.maximum)
    assert [read(size) for size in (largest, float(largest), str(largest))] == [largest] * 3


@pytest.mark.parametrize(
    ("content", "per_model", "said"),
    [
        ({"density": 1.5}, True, "0 to 1"), ({"weight": "heavy"}, True, "a number"),
        ({"weight": None}, True, "a number"), ({"weight": True}, True, "a number"),
        ({"weight": float("nan")}, True, "a number"), ({"weight": {"value": []}}, True, "empty list"),
        ({"normalize": "yes"}, False, "true or false"), ({"consensus": "som"}, False, "did you mean 'sum'"),
        ({"weight": {"filter": "x"}}, True, "no 'value'"), ([1], True, "mapping"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused_with_their_location(content: Any, per_model: bool, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        parse(content, per_model=per_model)
    assert caught.value.where.startswith("r.yaml: parameters")


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ({"densty": 0.5}, {"per_model": True}, "did you mean 'density'"),
        ({"select_topk": 0.5}, {"per_model": True}, "ties does not read 'select_topk'"),
        ({"dtype": "float16"}, {"per_model": False}, "move it to the top level"),
        ({"normalize": False}, {"per_model": True}, "top-level"),
        ({"weight": 1}, {"per_model": True, "is_base": True}, "base"),
        ({"weight": {"value": 1, "filtr": "x"}}, {"per_model": True}, "did you mean 'filter'"),
        ({"weight": [{"value": 1}, {"filter": "x", "value": 2}]}, {"per_model": True}, "first match"),
    ],
)
def test_what_mergekit_ignores_is_a_warning(content: Any, options: dict[str, Any], said: str) -> None:
    assert said in warnings(content, **options)


def test_every_fault_of_a_mapping_is_reported_and_a_faulty_value_counts_as_set() -> None:
    log = FindingLog()
    parameters = parse_parameters({"weight": "x", "density": 7}, TIES, "p", log, per_model=True)
    assert [finding.where for finding in log.findings] == ["p.weight", "p.density"]
    assert [setting.name for setting in parameters.settings] == ["weight", "density"]


TIES_RECIPE: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "base",
    "models": [
        {"model": "a", "parameters": {"weight": 0.6, "density": [0.5, 0.9]}},
        {"model": "b", "parameters": {"weight": 0.4}},
    ],
    "parameters": {"normalize": False, "density": 0.7},
    "dtype": "bfloat16",
}
LINEAR_RECIPE: dict[str, Any] = {
    "merge_method": "linear",
    "models": [{"model": "a", "parameters": {"weight": 1}}, {"model": "b"}],
}


def test_a_parameter_has_its_new_value_for_every_model() -> None:
    assert apply_overrides(TIES_RECIPE, {"density": 0.3}, "r") == {
        **TIES_RECIPE,
        "models": [{"model": "a", "parameters": {"weight": 0.6}}, {"model": "b", "parameters": {"weight": 0.4}}],
        "parameters": {"normalize": False, "density": 0.3},
    }


def test_another_method_keeps_only_the_parameters_that_it_has() -> None:
    assert apply_overrides(TIES_RECIPE, {"merge_method": "linear", "dtype": "float32"}, "r") == {
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


def test_texts_and_distance_rules_are_removed_if_the_method_does_not_use_them() -> None:
    models = [{"model": "a", "text": "a.jsonl"}, {"model": "b", "text": "b.jsonl"}]
    regmean = {"merge_method": "regmean", "base_model": "base", "models": models, "leave_out_beyond": 5}
    regmean["statistics"] = {"documents": 9}
    plain = {"models": [{"model": "a"}, {"model": "b"}], "base_model": "base", "parameters": {"weight": 1.0}}
    for method, kept in (("ties", {"leave_out_beyond": 5}), ("linear", {})):
        changed = apply_overrides(regmean, {"merge_method": method, "weight": 1.0}, "r")
        assert changed == {**plain, **kept, "merge_method": method}
        load_recipe(changed)
    assert apply_overrides(regmean, {"off_diagonals": 0.5}, "r")["models"] == models
    load_recipe(apply_overrides({**regmean, "merge_method": "regmean"}, {"off_diagonals": 0.5}, "r"))
    assert apply_overrides(regmean, {"base_model": "a", "off_diagonals": 0.5}, "r")["base_model"] == "a"


def test_models_can_be_removed_or_reweighted_and_parameters_written_as_in_a_recipe() -> None:
    models = [{"model": "b", "parameters": {"weight": 1.5}}]
    changed = apply_overrides(TIES_RECIPE, {"models": models, "density": 0.2}, "r")
    assert (changed["models"], changed["parameters"]) == (models, {"normalize": False, "density": 0.2})
    one, other = ({"parameters": {"density": 0.3}}, {"density": 0.3})
    assert apply_overrides(TIES_RECIPE, one, "r") == apply_overrides(TIES_RECIPE, other, "r")


def test_a_model_that_becomes_the_base_has_no_weight_of_its_own() -> None:
    recipe = {**LINEAR_RECIPE, "models": [*LINEAR_RECIPE["models"], {"model": "base", "parameters": {"weight": 1}}]}
    changed = apply_overrides(recipe, {"merge_method": "ties", "base_model": "base", "density": 0.5}, "r")
    assert changed["models"][-1] == {"model": "base"}


def test_overrides_do_not_modify_the_original_recipe() -> None:
    before = load_recipe(TIES_RECIPE).canonical()
    apply_overrides(TIES_RECIPE, {"density": 0.1, "dtype": "float32"}, "r")
    assert load_recipe(TIES_RECIPE).canonical() == before


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        (TIES_RECIPE, {"densty": 0.3}, r"(?s)remedies\[0\].*'densty'.*density"),
        (LINEAR_RECIPE, {"density": 0.3}, "a parameter of linear"),
        (TIES_RECIPE, {}, "no changes"),
    ],
)
def test_changes_that_the_method_does_not_have_are_refused(
    recipe: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        apply_overrides(recipe, changes, "remedies[0]")

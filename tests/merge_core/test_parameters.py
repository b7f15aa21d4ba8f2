"""Filters, gradients and the order of scopes follow mergekit's definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core import merge_methods
from mergegate.merge_core.errors import FindingLog, InvalidInput
from mergegate.merge_core.methods.contract import REQUIRED, Method, Parameter
from mergegate.merge_core.methods.registry import find_method
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


def test_the_first_filter_that_matches_counts() -> None:
    setting = [{"filter": "mlp", "value": 1}, {"filter": "up", "value": 2}, {"value": 3}]
    assert [weight(setting, name) for name in ("layers.0.mlp.up", "up_proj", "norm")] == [1, 2, 3]


def test_without_a_match_the_next_scope_applies_and_then_the_default() -> None:
    setting = {"filter": "mlp", "value": 1}
    assert weight(setting, "norm", 0.0, {"weight": 5}) == 5
    assert weight(setting, "norm") is REQUIRED


def test_a_star_filter_matches_every_tensor() -> None:
    assert weight({"filter": "*", "value": 4}, "anything") == 4


def test_a_filter_can_have_a_gradient() -> None:
    assert weight([{"filter": "mlp", "value": [0, 1]}, {"value": 9}], "mlp", 0.25) == 0.25


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    assert weight("1e-5") == 1e-5


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


COUNTS = [
    (method, parameter)
    for method in merge_methods().values()
    for parameter in method.parameters
    if parameter.kind == "int"
]


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
        ({"density": 1.5}, True, "0 to 1"),
        ({"weight": "heavy"}, True, "a number"),
        ({"weight": None}, True, "a number"),
        ({"weight": True}, True, "a number"),
        ({"weight": float("nan")}, True, "a number"),
        ({"weight": {"value": []}}, True, "empty list"),
        ({"normalize": "yes"}, False, "true or false"),
        ({"consensus": "som"}, False, "did you mean 'sum'"),
        ({"weight": {"filter": "x"}}, True, "no 'value'"),
        ([1], True, "mapping"),
    ],
)
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


def test_an_empty_list_is_not_set() -> None:
    assert weight([], "x", 0.0, {"weight": 5}) == 5


def test_every_fault_of_a_mapping_is_reported_and_a_faulty_value_counts_as_set() -> None:
    log = FindingLog()
    parameters = parse_parameters({"weight": "x", "density": 7}, TIES, "p", log, per_model=True)
    assert [finding.where for finding in log.findings] == ["p.weight", "p.density"]
    assert [setting.name for setting in parameters] == ["weight", "density"]

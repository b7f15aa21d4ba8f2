"""Operations on very large tensor tables, counted (not timed) on a small model of the same structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import load_benchmark

from mergegate.flows.cli.recipe_parents import clear_recipe
from mergegate.merge_core import EngineSettings, load_recipe, plan_merge
from mergegate.merge_core.architecture import parse_layer_place
from mergegate.merge_core.checkpoint import checkpoint as checkpoint_file
from mergegate.merge_core.checkpoint import open_checkpoint
from mergegate.merge_core.engine.forecast import estimate_needs, forecast
from mergegate.merge_core.plan import values
from mergegate.merge_core.recipe import Recipe, value_for

huge = load_benchmark("huge_plan")
LAYERS, DENSE, EXPERTS, SHARDS = 6, 2, 8, 5
SHAPES = huge.deepseek_shapes(LAYERS, EXPERTS, DENSE)
# One filter and one gradient distinguish the tensors.
PARAMETERS = {"weight": [{"filter": "down_proj", "value": 0.25}, {"value": [0.5, 1.0]}]}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("huge")
    for name in ("one", "two"):
        huge.write_sparse(place / name, SHAPES, SHARDS)
        config = (place / name / "config.json").read_text()
        (place / name / "config.json").write_text(config.replace(f": {huge.LAYERS},", f": {LAYERS},"))
    return place


def recipe_in(place: Path) -> Recipe:
    models = [{"model": str(place / name)} for name in ("one", "two")]
    return load_recipe({"merge_method": "linear", "models": models, "parameters": PARAMETERS})


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, key: Callable[..., Any]) -> Counter[Any]:
    """Count the calls of a function, grouped by ``key`` of their arguments."""
    seen: Counter[Any] = Counter()
    real = getattr(module, name)

    def counted(*words: Any, **more: Any) -> Any:
        seen[key(*words)] += 1
        return real(*words, **more)

    monkeypatch.setattr(module, name, counted)
    return seen


def test_the_generated_shapes_match_the_real_model() -> None:
    assert len(huge.deepseek_shapes()) == 45_395


def test_each_header_and_each_name_is_parsed_once(mixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = counting(monkeypatch, checkpoint_file, "read_header", lambda path: path)
    parse_layer_place.cache_clear()
    cleared = clear_recipe(recipe_in(mixtures))
    assert len(cleared.plan.jobs) == len(SHAPES)
    assert len(headers) == 2 * SHARDS
    assert set(headers.values()) == {1}
    assert parse_layer_place.cache_info().misses <= len(SHAPES) + LAYERS  # names of both models, and some lookups


def test_values_and_costs_are_computed_once_per_kind_of_tensor(mixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = {str(mixtures / name): open_checkpoint(mixtures / name) for name in ("one", "two")}
    asked = counting(monkeypatch, values, "value_for", lambda parameter, *_: parameter.name)
    costs = counting(monkeypatch, forecast, "work_of", lambda method, _: method.name)
    plan = plan_merge(recipe_in(mixtures), opened)
    needs = estimate_needs(plan, EngineSettings(), cores=1, device="cpu")
    # Two inputs, filtered or not, inside and outside of each layer.
    assert asked["weight"] <= 2 * 2 * (LAYERS + 1)
    shapes = len(set(SHAPES.values()))
    assert sum(costs.values()) <= 2 * shapes * (LAYERS + 1)
    assert needs.tensors == len(SHAPES)
    assert needs.bytes_passed == plan.bytes_read == sum(job.nbytes_in for job in plan.jobs)


def test_shared_values_equal_the_values_of_each_tensor_alone(mixtures: Path) -> None:
    recipe = recipe_in(mixtures)
    opened = {str(mixtures / name): open_checkpoint(mixtures / name) for name in ("one", "two")}
    weight = recipe.method.parameter("weight")
    assert weight is not None
    for job in plan_merge(recipe, opened).jobs:
        at = parse_layer_place(job.output.name)
        t = at.index / (LAYERS - 1) if at else 0.0
        wanted = value_for(weight, (recipe.parameters,), job.output.name, t)
        assert [own["weight"] for own in job.per_input] == [wanted, wanted], job.output.name

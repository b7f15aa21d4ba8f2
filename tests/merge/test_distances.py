"""Outlier exclusion and geometric-median weights by their definitions, and from weights on disk to the merge."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration_jobs import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from samples import sampled

from mergegate.merge_core import Recipe, load_recipe, merge_tensors, open_checkpoint, plan_merge
from mergegate.merge_core.adapters import apply_adapter, open_adapter
from mergegate.merge_core.analysis import find_outliers, geometric_median
from mergegate.merge_core.engine.execution import require_prepared
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.recipe import Source
from mergegate.tasks.merge import prepare_recipe, select_named_parents
from mergegate.tasks.models.checkpoints import pin_checkpoints, resolve_parents

MODELS = DEMO / "models"
Points = list[list[float]]


def gram_of(points: np.ndarray) -> list[list[float]]:
    return (points @ points.T).tolist()


points = st.integers(2, 6).flatmap(
    lambda count: st.lists(
        st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=4, max_size=4), min_size=count, max_size=count
    )
)


@pytest.mark.story
@given(points, st.lists(st.floats(0.1, 5), min_size=6, max_size=6))
def test_no_nearby_point_has_a_smaller_sum_of_distances(drawn: Points, voices: list[float]) -> None:
    models = np.array(drawn)
    given_voices = voices[: len(models)]
    shares = geometric_median(gram_of(models), given_voices)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0

    def total(point: np.ndarray) -> float:
        return float(np.array(given_voices) @ np.linalg.norm(models - point, axis=1))

    found = np.array(shares) @ models
    size = max(np.abs(models).max(), 1e-9)
    generator = np.random.default_rng(0)
    for scale in (1.0, 0.1, 0.01):
        for _ in range(20):
            assert total(found) <= total(found + scale * size * generator.normal(size=4)) + 1e-3 * size * len(models)


@settings(max_examples=20)
@given(st.floats(1e2, 1e6), st.integers(3, 7))
def test_one_model_cannot_move_the_geometric_median_far(times: float, count: int) -> None:
    honest = np.random.default_rng(count).normal(size=(count, 8))
    bad = -times * honest.mean(0)
    shares = geometric_median(gram_of(np.vstack([honest, bad])), [1.0] * (count + 1))
    place = np.array(shares) @ np.vstack([honest, bad])
    assert np.linalg.norm(place - honest.mean(0)) < 4 * np.linalg.norm(honest - honest.mean(0), axis=1).max()


def test_two_equal_models_share_the_weight_of_one() -> None:
    models = np.array([[1.0, 0], [1.0, 0], [0, 1.0], [0, 1.0]])
    np.testing.assert_allclose(geometric_median(gram_of(models), [1, 1, 1, 1]), [0.25] * 4)


def test_an_outlier_exceeds_the_median_length_by_the_factor() -> None:
    gram = np.diag([1.0, 4.0, 9.0, 100.0]).tolist()  # Lengths 1, 2, 3 and 10, with median 2.5.
    assert find_outliers(gram, 5) == {}
    assert find_outliers(gram, 3.9) == {3: 4.0}
    assert list(find_outliers(gram, 1.1)) == [2, 3]
    assert find_outliers(np.zeros((3, 3)).tolist(), 5) == {}  # No model was trained.
    assert find_outliers(np.diag([0.0, 1.0, 1.0]).tolist(), 5) == {}  # One model was not trained.


# --- from weights on disk ---


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save honest clients, two per skill, one with the update reversed and eight times as long, and one with NaN."""
    place = tmp_path_factory.mktemp("clients")
    base = {name: one.float() for name, one in load_file(MODELS / "base/model.safetensors").items()}
    draw = torch.Generator().manual_seed(0)
    own = {}
    for skill in ("reverser", "shifter"):
        tuned = load_file(MODELS / skill / "model.safetensors")
        own[skill] = {name: tuned[name].float() - base[name] for name in base}

    def save(name: str, change: Callable[[str], torch.Tensor], broken: slice = slice(0)) -> None:
        shutil.copytree(MODELS / "base", place / name)
        made = {key: (base[key] + change(key)).bfloat16() for key in base}
        made["model.norm.weight"].view(-1)[broken] = float("nan")
        save_file(made, place / name / "model.safetensors", {"format": "pt"})

    for number, skill in enumerate(("reverser", "reverser", "shifter", "shifter")):
        noise = {key: 0.1 * own[skill][key].std() * torch.randn(base[key].shape, generator=draw) for key in base}
        save(f"client-{number}", lambda key, skill=skill, noise=noise: own[skill][key] + noise[key])  # type: ignore[misc]
    save("turned", lambda key: -4 * (own["reverser"][key] + own["shifter"][key]))
    save("broken", lambda key: own["shifter"][key], broken=slice(3, 5))
    return place


def recipe_of(clients: Path, *names: str, base: Path = MODELS / "base", **more: Any) -> Recipe:
    models = [{"model": name if "+" in name else str(clients / name)} for name in names]
    return load_recipe({"base_model": str(base), "models": models, **more})


Home = Callable[[Recipe], Recipe]
MEDIAN: dict[str, Any] = {"merge_method": "median", "leave_out_beyond": 5}


@pytest.fixture
def prepare(tmp_path: Path, own_store: None) -> Home:
    hashes = HashMemo(tmp_path / "hashes.db")

    def of(recipe: Recipe) -> Recipe:
        by_ref = {one.ref: one for one in pin_checkpoints(resolve_parents(recipe), hashes)}
        return prepare_recipe(recipe, by_ref.__getitem__)

    return of


HONEST = ("client-0", "client-1", "client-2", "client-3")


@pytest.mark.parametrize("method", sampled(("median", "task_arithmetic"), ("median",)))
def test_outliers_and_broken_models_are_left_out(clients: Path, prepare: Home, method: str) -> None:
    more = {"parameters": {"weight": 0.2}} if method == "task_arithmetic" else {}
    recipe = recipe_of(clients, *HONEST, "turned", "broken", merge_method=method, leave_out_beyond=5, **more)
    checkpoints = {str(ref): open_checkpoint(Path(ref.path)) for ref in recipe.references()}
    with pytest.raises(InvalidInput, match="distances between the models are missing"):
        require_prepared(plan_merge(recipe, checkpoints))
    found = prepare(recipe)
    require_prepared(plan_merge(found, checkpoints))
    assert set(found.left_out) == {str(clients / "turned"), str(clients / "broken")}
    assert "times as long" in found.left_out[str(clients / "turned")]
    assert "2 numbers" in found.left_out[str(clients / "broken")]
    assert [Path(one.model.path).name for one in found.sources] == [*HONEST, "base"]
    assert prepare(found) is found
    alone = recipe_of(clients, *HONEST, merge_method=method, **more)
    opened = {str(ref): open_checkpoint(Path(ref.path)) for ref in found.references()}
    for (name, one), (_, other) in zip(
        merge_tensors(plan_merge(found, opened)), merge_tensors(plan_merge(alone, opened)), strict=True
    ):
        assert torch.equal(one, other), name


def test_a_rule_that_leaves_no_model_out_only_adds_the_distances(clients: Path, prepare: Home) -> None:
    recipe = recipe_of(clients, *HONEST, **MEDIAN)
    found = prepare(recipe)
    assert found.left_out == {}
    assert [round(one.length, 1) for one in found.distances.values()] == pytest.approx([1.0] * 4, abs=0.2)
    # Two models of one skill are close; those of different skills are as far apart as unrelated task vectors.
    assert all(0.8 < one.apart < 1.6 for one in found.distances.values())
    assert found.modules == recipe.modules
    assert found.canonical() != recipe.canonical()


def weight_of(source: Source) -> float:
    """Return the weight that the prepared recipe gives to a model."""
    return float(source.parameters.get("weight").conditions[0].values[0])


@pytest.mark.story
def test_geometric_median_follows_the_honest_models(clients: Path, prepare: Home) -> None:
    found = prepare(recipe_of(clients, *HONEST, "turned", merge_method="geometric_median"))
    shares = {Path(one.model.path).name: weight_of(one) for one in found.sources[:-1]}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["turned"] < 0.05
    assert all(shares[name] > 0.2 for name in HONEST)
    weights = [
        {"model": str(clients / name), "parameters": {"weight": 3 if name == HONEST[0] else 1}} for name in HONEST
    ]
    louder = prepare(recipe_of(clients, models=weights, merge_method="geometric_median"))
    voices = {Path(one.model.path).name: weight_of(one) for one in louder.sources[:-1]}
    assert voices["client-0"] > 2 * voices["client-1"]


@pytest.mark.story
def test_a_broken_model_is_refused_by_name_without_a_rule(clients: Path, prepare: Home) -> None:
    with pytest.raises(InvalidInput, match="leave_out_beyond") as problem:
        prepare(recipe_of(clients, *HONEST, "broken", merge_method="geometric_median"))
    assert "broken" in str(problem.value)


def test_a_broken_base_is_refused_by_name(clients: Path, prepare: Home) -> None:
    with pytest.raises(InvalidInput, match=r"broken(.|\n)*NaN or infinity"):
        prepare(recipe_of(clients, *HONEST, base=clients / "broken", merge_method="geometric_median"))


# --- adapters in place of models ---

LORA = DEMO / "adapters/reverser-lora"


def adapter(place: Path, name: str, factor: float, at: int | None = None) -> str:
    """Copy the shipped adapter with both factors scaled, or with one element NaN; return its name for a recipe."""
    shutil.copytree(LORA, place / name)
    tensors = {key: one.float() * factor for key, one in load_file(LORA / "adapter_model.safetensors").items()}
    if at is not None:
        next(iter(tensors.values())).view(-1)[at] = float("nan")
    save_file(tensors, place / name / "adapter_model.safetensors", {"format": "pt"})
    return f"{MODELS / 'base'}+{place / name}"


def test_adapters_have_the_distances_of_their_applied_models(clients: Path, prepare: Home, tmp_path: Path) -> None:
    # Scaling both factors by 4 makes the second one 16 times as long.
    names = [adapter(tmp_path, "sound", 1), adapter(tmp_path, "far", 4)]
    found = prepare(recipe_of(clients, *HONEST, *names, **MEDIAN))
    assert set(found.left_out) == {names[1]}
    base = load_file(MODELS / "base/model.safetensors")
    alone = load_recipe({"merge_method": "passthrough", "models": [{"model": names[0]}]})
    applied = apply_adapter(open_checkpoint(MODELS / "base"), open_adapter(tmp_path / "sound"))
    made = dict(merge_tensors(plan_merge(alone, {names[0]: applied})))
    lengths = [_length(base, load_file(clients / one / "model.safetensors")) for one in HONEST]
    lengths += [_length(base, made)]
    median = float(np.median([*lengths, 16 * lengths[-1]]))
    assert found.distances[names[0]].length == pytest.approx(lengths[-1] / median, rel=0.02)


def _length(base: dict[str, torch.Tensor], model: dict[str, torch.Tensor]) -> float:
    return float(sum((model[key].double() - one.double()).square().sum() for key, one in base.items()) ** 0.5)


@pytest.mark.story
@pytest.mark.parametrize(("factor", "at"), [(1.0, 3), (1e25, None)])
def test_an_adapter_that_overflows_is_left_out(
    clients: Path, prepare: Home, tmp_path: Path, factor: float, at: int | None
) -> None:
    broken = adapter(tmp_path, "broken", factor, at)
    assert "not finite" in prepare(recipe_of(clients, *HONEST, broken, **MEDIAN)).left_out[broken]


@pytest.mark.story
def test_a_broken_base_is_not_blamed_on_the_adapters_on_it(clients: Path, prepare: Home, tmp_path: Path) -> None:
    named = [
        adapter(tmp_path, name, 1).replace(str(MODELS / "base"), str(clients / "broken")) for name in ("one", "two")
    ]
    with pytest.raises(InvalidInput, match="a base with finite numbers"):
        prepare(recipe_of(clients, *named, base=clients / "broken", **MEDIAN))


def test_leaving_out_all_models_is_refused(clients: Path, prepare: Home) -> None:
    with pytest.raises(InvalidInput, match="all models are left out"):
        prepare(recipe_of(clients, "broken", **MEDIAN))


@pytest.mark.story
def test_a_left_out_model_is_no_longer_a_parent(clients: Path, prepare: Home, tmp_path: Path) -> None:
    found = prepare(recipe_of(clients, *HONEST, "turned", **MEDIAN))
    every = recipe_of(clients, *HONEST, "turned", merge_method="median")
    parents = pin_checkpoints(resolve_parents(every), HashMemo(tmp_path / "more.db"))
    assert [parent.name for parent in select_named_parents(found, parents)] == [*HONEST, "base"]


SLICED = {"sources": [{"model": name, "layer_range": [0, 2]} for name in ("a", "base")]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"merge_method": "linear", "parameters": {"weight": 1}}, "no base to measure task vectors"),
        *(
            ({"merge_method": "median", "leave_out_beyond": factor}, "a factor of the median length")
            for factor in (0.5, True, "5", float("inf"))
        ),
        ({"merge_method": "geometric_median", "models": None, "slices": [SLICED]}, "whole models"),
    ],
)
def test_invalid_distance_settings_are_refused(change: dict[str, Any], said: str) -> None:
    document = {"base_model": "base", "models": [{"model": "a"}], "leave_out_beyond": 5, **change}
    with pytest.raises(InvalidInput) as problem:
        load_recipe({key: value for key, value in document.items() if value is not None})
    assert said in str(problem.value)

"""Merges by importance match the float64 formula through the engine and keep their promises in special cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import load, merge_text, open_models, plan_recipe, save_checkpoint
from safetensors.torch import load_file, save_file

from mergegate.merge_core import EngineSettings, load_recipe, merge_weights, plan_merge
from mergegate.merge_core.checkpoint import IMPORTANCE, measurement_file_name, open_importance, open_moments
from mergegate.merge_core.engine.forecast import estimate_needs
from mergegate.merge_core.errors import InvalidInput

SHAPES = {
    "model.embed_tokens.weight": (90, 40),
    "model.layers.0.mlp.up_proj.weight": (300, 40),
    "model.norm.weight": (40,),
}
MODELS = ("a", "b", "c")
Array = np.ndarray


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed, name in enumerate(("base", *MODELS)):
        made = torch.Generator().manual_seed(seed)
        save_checkpoint(tmp_path / name, {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()})
    return tmp_path


def recipe(more: str = "", weights: tuple[float, ...] = (1.0, 1.0, 1.0)) -> str:
    models = ", ".join(
        f"{{model: {name}, text: {name}, parameters: {{weight: {weight}}}}}"
        for name, weight in zip(MODELS, weights, strict=True)
    )
    return f"merge_method: fisher\nmodels: [{models}]\n{more}"


def importance(root: Path) -> dict[str, list[Array]]:
    kept = [load_file(root / "importance" / name / measurement_file_name(IMPORTANCE, 0)) for name in MODELS]
    return {name: [one[name].double().numpy() for one in kept] for name in SHAPES}


def formula(values: list[Array], matters: list[Array], weights: tuple[float, ...]) -> Array:
    """Return the published formula's result, or the weighted mean where the importance is zero."""
    total = sum(much * weight for much, weight in zip(matters, weights, strict=True))
    above = sum(one * much * weight for one, much, weight in zip(values, matters, weights, strict=True))
    mean = sum(one * weight for one, weight in zip(values, weights, strict=True)) / sum(weights)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.asarray(total) > 0, above / total, mean)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 0.0, 2.5)])
@pytest.mark.parametrize("settings", [{}, {"block_elements": 1, "threads": 3}, {"threads": 1}])
def test_fisher_matches_the_published_formula(root: Path, weights: tuple[float, ...], settings: dict[str, Any]) -> None:
    merge_text(recipe(weights=weights), root, **settings)
    found, matters = load(root / "out"), importance(root)
    for name in SHAPES:
        values = [load(root / model)[name].astype(float) for model in MODELS]
        assert any((np.asarray(one) == 0).any() for one in matters[name])
        np.testing.assert_allclose(
            found[name].astype(float), formula(values, matters[name], weights), rtol=3e-6, atol=1e-6, err_msg=name
        )


def test_fisher_scales_the_difference_from_a_base(root: Path) -> None:
    merge_text(recipe("base_model: base\nparameters: {lambda: 0.7}\n"), root)
    found, matters, base = load(root / "out"), importance(root), load(root / "base")
    for name in SHAPES:
        values = [load(root / model)[name].astype(float) for model in MODELS]
        whole = formula(values, matters[name], (1.0, 1.0, 1.0))
        start = base[name].astype(float)
        np.testing.assert_allclose(found[name].astype(float), start + 0.7 * (whole - start), rtol=3e-6, atol=2e-6)


def test_only_the_ratio_of_importances_matters(root: Path) -> None:
    """Squared derivatives can be as small as float32 allows, so only the ratios of importance may matter."""
    merge_text(recipe(), root)
    expected = load(root / "out")
    for model in MODELS:
        file = root / "importance" / model / measurement_file_name(IMPORTANCE, 0)
        save_file({name: tensor * 2.0**-70 for name, tensor in load_file(file).items()}, file)
    merge_text(recipe(), root, out="tiny")
    for name, tensor in load(root / "tiny").items():
        assert np.array_equal(tensor, expected[name])


def test_tensors_without_importance_become_the_mean(root: Path) -> None:
    merge_text(recipe(), root)  # This draws the importance.
    place = root / "importance" / "b"
    file = place / measurement_file_name(IMPORTANCE, 0)
    kept = load_file(file)
    missing = "model.layers.0.mlp.up_proj.weight"
    del kept[missing]
    save_file(kept, file)
    said = (place / "importance.json").read_text()
    (place / "importance.json").write_text(said.replace(f'"{missing}": "{missing}",\n', ""))
    merge_text(recipe(), root, out="again")
    mean = np.mean([load(root / model)[missing].astype(float) for model in MODELS], axis=0)
    np.testing.assert_allclose(load(root / "again")[missing], mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_nan_in_the_importance_is_refused(root: Path, broken: float) -> None:
    merge_text(recipe(), root)
    file = root / "importance" / "c" / measurement_file_name(IMPORTANCE, 0)
    kept = load_file(file)
    kept["model.norm.weight"][7] = broken
    save_file(kept, file)
    with pytest.raises(InvalidInput, match=r"importance-00000.*: model.norm.weight(.|\n)*1 NaN or infinite"):
        merge_text(recipe(), root, out="again")


def test_mismatched_importance_files_are_refused(root: Path) -> None:
    merge_text(recipe(), root)
    (root / "importance/a" / measurement_file_name(IMPORTANCE, 0)).unlink()
    with pytest.raises(InvalidInput, match="no stored tensor"):
        open_importance(root / "importance/a")


ANY_JSON = (None, True, 5, 1.5, "unheard-of", "", [], ["x"], {}, {"a": 1})


@pytest.mark.parametrize(
    ("name", "key", "read"), [("importance.json", "tensors", open_importance), ("inputs.json", "inputs", open_moments)]
)
def test_a_damaged_index_of_a_measurement_is_refused(
    tmp_path: Path, name: str, key: str, read: Callable[[Path], object]
) -> None:
    indexes = [{key: {"w": owner}} for owner in ANY_JSON]
    indexes += [{key: owners} for owners in ANY_JSON if not isinstance(owners, dict)]
    for index in (*indexes, {}, {"positions": 1}, [], "x", 5, None):
        (tmp_path / name).write_text(json.dumps(index))
        with pytest.raises(InvalidInput, match=name):
            read(tmp_path)


def test_importance_is_included_in_the_forecast_and_in_the_record(root: Path) -> None:
    loaded = load_recipe(recipe())
    before, after = plan_merge(loaded, open_models(loaded, root)), plan_recipe(recipe(), root)
    weights = sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert before.bytes_read == after.bytes_read == len(MODELS) * weights * (4 + 4)
    how: Any = {"settings": EngineSettings(), "cores": 2, "device": "cpu"}
    assert replace(estimate_needs(before, **how), input_files=0) == replace(estimate_needs(after, **how), input_files=0)


def test_an_unprepared_merge_is_refused(root: Path) -> None:
    loaded = load_recipe(recipe())
    plan = plan_merge(loaded, open_models(loaded, root))
    with pytest.raises(InvalidInput, match="on their texts are missing"):
        merge_weights(plan, root / "out", seed=0)


def test_a_recipe_without_stored_matrices_has_no_wide_inputs() -> None:
    with pytest.raises(InvalidInput, match="does not store matrices"):
        load_recipe(recipe("statistics: {diagonal_above: 9}\n"))

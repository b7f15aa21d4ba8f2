"""Every merge method matches its float64 reference, in blocks and with both kinds of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from family import load, merge_text, save_checkpoint

MODELS = """
models:
  - {model: a, parameters: {weight: 0.7, density: 0.4}}
  - {model: b, parameters: {weight: 0.5, density: 0.6}}
  - {model: c, parameters: {weight: -0.3, density: 1.0}}
base_model: base
"""
ONE = "\nbase_model: base\nmodels: [{model: a}]\n"
FIRST = "\nbase_model: 'base'\nmodels: [{model: a}]\n"  # The quotes keep the test from reading ``model: b``.
TWO = "\nmodels: [{model: a, parameters: {weight: 0.7}}, {model: b, parameters: {weight: 0.2}}]\n"
THREE = "\nbase_model: base\nmodels: [{model: a}, {model: b}, {model: c}]\n"
WEIGHTS, DENSITIES = [0.7, 0.5, -0.3], [0.4, 0.6, 1.0]

# Recipe text, oracle, the oracle's arguments.
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "linear": (
        "merge_method: linear\nmodels: [{model: a, parameters: {weight: 2}}, {model: b, parameters: {weight: 1}}]",
        oracle.linear,
        {"weight": [2, 1]},
    ),
    "linear, not normalised": (
        "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.4, normalize: false}",
        oracle.linear,
        {"weight": [0.4, 0.4], "normalize": False},
    ),
    "slerp from the base": (
        "merge_method: slerp\nbase_model: base\nmodels: [{model: a}, {model: base}]\nparameters: {t: 0.3}",
        oracle.slerp,
        {"t": 0.3},
    ),
    "task_arithmetic": (
        "merge_method: task_arithmetic" + MODELS + "parameters: {lambda: 0.9}",
        oracle.task_arithmetic,
        {"weight": WEIGHTS, "scale": 0.9},
    ),
    "task_arithmetic, normalised": (
        "merge_method: task_arithmetic" + MODELS + "parameters: {normalize: true}",
        oracle.task_arithmetic,
        {"weight": WEIGHTS, "normalize": True},
    ),
    "ties": ("merge_method: ties" + MODELS, oracle.ties, {"weight": WEIGHTS, "density": DENSITIES}),
    "ties by count, rescaled": (
        "merge_method: ties" + MODELS + "parameters: {consensus: count, rescale: true, normalize: false, lambda: 1.2}",
        oracle.ties,
        {
            "weight": WEIGHTS,
            "density": DENSITIES,
            "consensus": "count",
            "rescale": True,
            "normalize": False,
            "scale": 1.2,
        },
    ),
    "localize_and_stitch": (
        "merge_method: localize_and_stitch" + MODELS + "parameters: {lambda: 1.1}",
        oracle.localize_and_stitch,
        {"weight": WEIGHTS, "density": DENSITIES, "scale": 1.1},
    ),
    "localize_and_stitch, added up": (
        "merge_method: localize_and_stitch" + THREE + "parameters: {weight: 0.4, density: 0.3, normalize: false}",
        oracle.localize_and_stitch,
        {"weight": [0.4] * 3, "density": [0.3] * 3, "normalize": False},
    ),
    "consensus_ta": (
        "merge_method: consensus_ta" + THREE + "parameters: {weight: 0.6, lambda: 0.8}",
        oracle.consensus_ta,
        {"weight": [0.6] * 3, "threshold": [0.4] * 3, "scale": 0.8},
    ),
    "consensus_ta of all, each with its own threshold": (
        "merge_method: consensus_ta\nbase_model: base\nmodels:\n"
        "  - {model: a, parameters: {weight: 0.7, threshold: 0.1}}\n"
        "  - {model: b, parameters: {weight: 0.5, threshold: 0.3}}\n"
        "  - {model: c, parameters: {weight: -0.3, threshold: 0.05}}\n"
        "parameters: {agreement: 3}",
        oracle.consensus_ta,
        {"weight": WEIGHTS, "threshold": [0.1, 0.3, 0.05], "agreement": 3},
    ),
    "median": ("merge_method: median" + THREE, oracle.median, {}),
    "median of two": (
        "merge_method: median\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {lambda: 0.5}",
        oracle.median,
        {"scale": 0.5},
    ),
    "trimmed_mean": (
        "merge_method: trimmed_mean" + THREE + "parameters: {trim: 0.34, lambda: 1.3}",
        oracle.trimmed_mean,
        {"left_out": 1, "scale": 1.3},
    ),
    "trimmed_mean of few": ("merge_method: trimmed_mean" + THREE, oracle.trimmed_mean, {"left_out": 0}),
    "moving_mean of a first round": ("merge_method: moving_mean" + FIRST, oracle.moving_mean, {"keep": 0.9}),
    "moving_mean": (
        "merge_method: moving_mean\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {keep: 0.7}",
        oracle.moving_mean,
        {"keep": 0.7},
    ),
    "moving_squares of a first round": ("merge_method: moving_squares" + FIRST, oracle.moving_squares, {"keep": 0.99}),
    "moving_squares": (
        "merge_method: moving_squares\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {keep: 0.6}",
        oracle.moving_squares,
        {"keep": 0.6},
    ),
    "adam": (
        "merge_method: adam\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {rate: 0.02, tau: 0.01}",
        oracle.adam,
        {"rate": 0.02, "tau": 0.01},
    ),
    "slerp of three, one after the other": (
        "merge_method: slerp\nbase_model: base\nmodels: [{model: a}, {model: b}, {model: c}]\nparameters: {t: 0.3}",
        oracle.slerp_chain,
        {"t": 0.3},
    ),
    "slerp of a model with its base implied": (
        "merge_method: slerp\nbase_model: base\nmodels: [{model: a}]\nparameters: {t: 0.8}",
        oracle.slerp,
        {"t": 0.8},
    ),
    "nuslerp": ("merge_method: nuslerp" + TWO, oracle.nuslerp, {"weight": [0.7, 0.2]}),
    "nuslerp by rows": (
        "merge_method: nuslerp" + TWO + "parameters: {nuslerp_flatten: false}",
        oracle.nuslerp,
        {"weight": [0.7, 0.2], "flatten": False},
    ),
    "nuslerp by columns": (
        "merge_method: nuslerp" + TWO + "parameters: {nuslerp_flatten: false, nuslerp_row_wise: true}",
        oracle.nuslerp,
        {"weight": [0.7, 0.2], "flatten": False, "row_wise": True},
    ),
    "nuslerp by columns of task vectors": (
        "merge_method: nuslerp"
        + TWO
        + "base_model: base\nparameters: {nuslerp_flatten: false, nuslerp_row_wise: true}",
        oracle.nuslerp,
        {"weight": [0.7, 0.2], "flatten": False, "row_wise": True},
    ),
    "nuslerp by rows of task vectors": (
        "merge_method: nuslerp" + TWO + "base_model: base\nparameters: {nuslerp_flatten: false}",
        oracle.nuslerp,
        {"weight": [0.7, 0.2], "flatten": False},
    ),
    "nuslerp of task vectors": (
        "merge_method: nuslerp" + TWO + "base_model: base",
        oracle.nuslerp,
        {"weight": [0.7, 0.2]},
    ),
    "multislerp": ("merge_method: multislerp" + TWO, oracle.multislerp, {"weight": [0.7, 0.2]}),
    "multislerp of task vectors": (
        "merge_method: multislerp" + TWO + "base_model: base\nparameters: {normalize_weights: false}",
        oracle.multislerp,
        {"weight": [0.7, 0.2], "normalize": False},
    ),
    "karcher": ("merge_method: karcher\nmodels: [{model: a}, {model: b}, {model: c}]", oracle.karcher, {}),
    "karcher in two steps": (
        "merge_method: karcher\nmodels: [{model: a}, {model: b}, {model: c}]\nparameters: {max_iter: 2, tol: 1e-9}",
        oracle.karcher,
        {"max_iter": 2, "tol": 1e-9},
    ),
    "model_stock": ("merge_method: model_stock" + THREE, oracle.model_stock, {}),
    "model_stock by rows": (
        "merge_method: model_stock" + THREE + "parameters: {filter_wise: true}",
        oracle.model_stock,
        {"filter_wise": True},
    ),
    "breadcrumbs": (
        "merge_method: breadcrumbs" + MODELS,
        oracle.breadcrumbs,
        {"weight": WEIGHTS, "density": DENSITIES},
    ),
    "breadcrumbs_ties with many outliers": (
        "merge_method: breadcrumbs_ties" + MODELS + "parameters: {gamma: 0.5}",
        oracle.breadcrumbs,
        {"weight": WEIGHTS, "density": DENSITIES, "gamma": 0.5, "consensus": "sum"},
    ),
    "sce": ("merge_method: sce" + THREE, oracle.sce, {}),
    "sce of a part": (
        "merge_method: sce" + THREE + "parameters: {select_topk: 0.3}",
        oracle.sce,
        {"select_topk": 0.3},
    ),
    "ram": ("merge_method: ram" + THREE + "parameters: {epsilon: 0.1}", oracle.ram, {"epsilon": 0.1}),
    "ramplus_tl": (
        "merge_method: ramplus_tl" + THREE + "parameters: {epsilon: 0.15, r: 0.5, alpha: 3}",
        oracle.ram,
        {"epsilon": 0.15, "plus": True, "r": 0.5, "alpha": 3},
    ),
    "nearswap": ("merge_method: nearswap" + ONE + "parameters: {t: 0.05}", oracle.nearswap, {"t": 0.05}),
    "arcee_fusion": ("merge_method: arcee_fusion" + ONE, oracle.arcee_fusion, {}),
}


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("case", CASES)
def test_methods_match_their_float64_formula(family: Path, case: str, kernels: str) -> None:
    text, reference, arguments = CASES[case]
    merge_text(text, family, kernels=kernels)
    inputs = {name: load(family / name) for name in ("base", "a", "b", "c")}
    models = [name for name in "abc" if f"model: {name}" in text]
    has_base = "base_model" in text and case != "slerp of three, one after the other"
    for name, merged in load(family / "out").items():
        expected = reference(
            inputs["base"][name] if has_base else None, [inputs[model][name] for model in models], **arguments
        )
        np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_float64_inputs_are_merged_in_float64(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    base = generator.normal(size=(8, 8))
    models = [base + 0.1 * generator.normal(size=(8, 8)) for _ in range(3)]
    for name, values in zip(("base", "a", "b", "c"), (base, *models), strict=True):
        save_checkpoint(tmp_path / name, {"model.embed_tokens.weight": torch.from_numpy(values)})
    merge_text("merge_method: ties" + MODELS, tmp_path, "out")
    expected = oracle.ties(base, models, weight=WEIGHTS, density=DENSITIES)
    np.testing.assert_allclose(load(tmp_path / "out")["model.embed_tokens.weight"], expected, rtol=1e-14, atol=1e-14)

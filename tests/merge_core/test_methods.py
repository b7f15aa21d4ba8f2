"""Every merge method against float64 references written from the formulas, in blocks and with both kinds of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from family import load, merge_text

MODELS = """
models:
  - {model: a, parameters: {weight: 0.7, density: 0.4}}
  - {model: b, parameters: {weight: 0.5, density: 0.6}}
  - {model: c, parameters: {weight: -0.3, density: 1.0}}
base_model: base
"""
WEIGHTS, DENSITIES = [0.7, 0.5, -0.3], [0.4, 0.6, 1.0]

# Recipe text, oracle, its arguments.
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
}


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("case", CASES)
def test_a_method_gives_what_its_formula_says(family: Path, case: str, kernels: str) -> None:
    text, reference, arguments = CASES[case]
    merge_text(text, family, kernels=kernels)
    inputs = {name: load(family / name) for name in ("base", "a", "b", "c")}
    models = [name for name in "abc" if f"model: {name}" in text]
    has_base = "base_model" in text
    for name, merged in load(family / "out").items():
        expected = reference(
            inputs["base"][name] if has_base else None, [inputs[model][name] for model in models], **arguments
        )
        np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-6, err_msg=name)

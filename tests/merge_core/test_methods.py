"""Every merge method matches its float64 reference, with both kinds of kernels, and robust ones keep their promises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from family import load, merge_text, save_checkpoint, save_family
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mergegate.merge_core.methods import Block, TensorTask, find_method, mask_key
from mergegate.merge_core.methods.contract import GRAIN, StoredBlock

MODELS = """
models:
  - {model: a, parameters: {weight: 0.7, density: 0.4}}
  - {model: b, parameters: {weight: 0.5, density: 0.6}}
  - {model: c, parameters: {weight: -0.3, density: 1.0}}
base_model: base
"""
ONE = "\nbase_model: base\nmodels: [{model: a}]\n"
PAIR = "\nmodels: [{model: a}, {model: b}]\n"
BASED = "\nbase_model: base" + PAIR
TWO = "\nmodels: [{model: a, parameters: {weight: 0.7}}, {model: b, parameters: {weight: 0.2}}]\n"
MOVED = TWO + "base_model: base\n"  # Task vectors of two models.
ALL = "\nmodels: [{model: a}, {model: b}, {model: c}]\n"
THREE = "\nbase_model: base" + ALL
LIMITS = """
base_model: base
models:
  - {model: a, parameters: {weight: 0.7, threshold: 0.1}}
  - {model: b, parameters: {weight: 0.5, threshold: 0.3}}
  - {model: c, parameters: {weight: -0.3, threshold: 0.05}}
"""
OWN: dict[str, Any] = {"weight": [0.7, 0.5, -0.3]}
SPARSE: dict[str, Any] = {**OWN, "density": [0.4, 0.6, 1.0]}
BOTH: dict[str, Any] = {"weight": [0.7, 0.2]}
Case = tuple[str, Any, dict[str, Any]]


def case(method: str, models: str, parameters: str = "", reference: Any = None, **arguments: Any) -> Case:
    """Return the text of a recipe, its oracle, and the oracle's arguments."""
    text = f"merge_method: {method}{models}" + (f"parameters: {{{parameters}}}\n" if parameters else "")
    return text, reference or getattr(oracle, method), arguments


CASES: dict[str, Case] = {
    "linear": case("linear", TWO, weight=[0.7, 0.2]),
    "linear, not normalised": case("linear", PAIR, "weight: 0.4, normalize: false", weight=[0.4] * 2, normalize=False),
    "slerp from the base": case("slerp", "\nbase_model: base\nmodels: [{model: a}, {model: base}]\n", "t: 0.3", t=0.3),
    "slerp of three, one after the other": case("slerp", THREE, "t: 0.3", oracle.slerp_chain, t=0.3),
    "slerp of a model with its base implied": case("slerp", ONE, "t: 0.8", t=0.8),
    "task_arithmetic": case("task_arithmetic", MODELS, "lambda: 0.9", **OWN, scale=0.9),
    "task_arithmetic, normalised": case("task_arithmetic", MODELS, "normalize: true", **OWN, normalize=True),
    "ties": case("ties", MODELS, **SPARSE),
    "ties by count, rescaled": case(
        "ties", MODELS, "consensus: count, rescale: true, normalize: false, lambda: 1.2",
        **SPARSE, consensus="count", rescale=True, normalize=False, scale=1.2,
    ),
    "localize_and_stitch": case("localize_and_stitch", MODELS, "lambda: 1.1", **SPARSE, scale=1.1),
    "localize_and_stitch, added up": case(
        "localize_and_stitch", THREE, "weight: 0.4, density: 0.3, normalize: false",
        weight=[0.4] * 3, density=[0.3] * 3, normalize=False,
    ),
    "consensus_ta": case(
        "consensus_ta", THREE, "weight: 0.6, lambda: 0.8", weight=[0.6] * 3, threshold=[0.4] * 3, scale=0.8
    ),
    "consensus_ta of all, each with its own threshold": case(
        "consensus_ta", LIMITS, "agreement: 3", **OWN, threshold=[0.1, 0.3, 0.05], agreement=3
    ),
    "median": case("median", THREE), "median of two": case("median", BASED, "lambda: 0.5", scale=0.5),
    "trimmed_mean": case("trimmed_mean", THREE, "trim: 0.34, lambda: 1.3", left_out=1, scale=1.3),
    "trimmed_mean of few": case("trimmed_mean", THREE, left_out=0),
    "nuslerp": case("nuslerp", TWO, **BOTH),
    "nuslerp by rows": case("nuslerp", TWO, "nuslerp_flatten: false", **BOTH, flatten=False),
    "nuslerp by columns": case(
        "nuslerp", TWO, "nuslerp_flatten: false, nuslerp_row_wise: true", **BOTH, flatten=False, row_wise=True
    ),
    "nuslerp by columns of task vectors": case(
        "nuslerp", MOVED, "nuslerp_flatten: false, nuslerp_row_wise: true", **BOTH, flatten=False, row_wise=True
    ),
    "nuslerp by rows of task vectors": case("nuslerp", MOVED, "nuslerp_flatten: false", **BOTH, flatten=False),
    "nuslerp of task vectors": case("nuslerp", MOVED, **BOTH), "multislerp": case("multislerp", TWO, **BOTH),
    "multislerp of task vectors": case("multislerp", MOVED, "normalize_weights: false", **BOTH, normalize=False),
    "karcher": case("karcher", ALL),
    "karcher in two steps": case("karcher", ALL, "max_iter: 2, tol: 1e-9", max_iter=2, tol=1e-9),
    "model_stock": case("model_stock", THREE),
    "model_stock by rows": case("model_stock", THREE, "filter_wise: true", filter_wise=True),
    "breadcrumbs": case("breadcrumbs", MODELS, **SPARSE),
    "breadcrumbs_ties with many outliers": case(
        "breadcrumbs_ties", MODELS, "gamma: 0.5", oracle.breadcrumbs, **SPARSE, gamma=0.5, consensus="sum"
    ),
    "sce": case("sce", THREE), "sce of a part": case("sce", THREE, "select_topk: 0.3", select_topk=0.3),
    "ram": case("ram", THREE, "epsilon: 0.1", epsilon=0.1),
    "ramplus_tl": case(
        "ramplus_tl", THREE, "epsilon: 0.15, r: 0.5, alpha: 3", oracle.ram, epsilon=0.15, plus=True, r=0.5, alpha=3
    ),
    "nearswap": case("nearswap", ONE, "t: 0.05", t=0.05), "arcee_fusion": case("arcee_fusion", ONE),
}  # fmt: skip


def expected_tensor(case: str, base: Any, models: Mapping[str, Any]) -> Any:
    """Return what the oracle of a case makes of a base and of models by name."""
    text, reference, arguments = CASES[case]
    named = [models[name] for name in "abc" if f"model: {name}" in text]
    return reference(base if "base_model" in text and reference is not oracle.slerp_chain else None, named, **arguments)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    root = save_family(tmp_path_factory.mktemp("family"))
    return root, {name: load(root / name) for name in ("base", *"abc")}


@pytest.mark.parametrize("case", CASES)
def test_methods_match_their_float64_formula(models: Any, tmp_path: Path, case: str) -> None:
    root, inputs = models
    for kernels in ("torch", "fused"):
        merge_text(CASES[case][0], root, str(tmp_path / kernels), kernels=kernels)
        for name, merged in load(tmp_path / kernels).items():
            expected = expected_tensor(case, inputs["base"][name], {one: inputs[one][name] for one in "abc"})
            np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-6, err_msg=f"{kernels}: {name}")


def test_float64_inputs_are_merged_in_float64(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    base = generator.normal(size=(8, 8))
    models = [base + 0.1 * generator.normal(size=(8, 8)) for _ in range(3)]
    for name, values in zip(("base", "a", "b", "c"), (base, *models), strict=True):
        save_checkpoint(tmp_path / name, {"model.embed_tokens.weight": torch.from_numpy(values)})
    merge_text("merge_method: ties" + MODELS, tmp_path, "out")
    expected = oracle.ties(base, models, **SPARSE)
    np.testing.assert_allclose(load(tmp_path / "out")["model.embed_tokens.weight"], expected, rtol=1e-14, atol=1e-14)


ELEMENTS = 40
NUMBERS = st.floats(-4, 4, width=32)
HUGE = float(np.float32(1e30))
ABSURD = st.floats(-HUGE, HUGE, width=32)


def merged_block(
    name: str, base: Any, models: Any, *, fused: bool, own: dict[str, Any] | None = None, **shared: Any
) -> Any:
    """Merge one float32 tensor in a single block, with the given kind of kernels."""
    method = find_method(name, "test")
    inputs = np.stack([base, *models]).astype(np.float32)
    count = len(models)
    values = {one.name: one.default for one in method.parameters if one.scope == "shared"} | shared
    each = {one.name: one.default for one in method.parameters if one.scope != "shared"} | (own or {})
    seeds = tuple(mask_key(0, "w", i) for i in range(count + 1))
    task = TensorTask("w", (inputs.shape[1],), "float32", True, values, ({}, *[each] * count), seeds)
    steps, result = method.steps(task), None
    block = Block(torch.from_numpy(inputs), 0, GRAIN)
    while True:
        try:
            step = steps.send(result)
        except StopIteration as stop:
            merged_map = stop.value
            break
        result = step.combine([step.reduce_block(block).numpy()])
    if not fused:
        return merged_map.map_block(block).numpy()
    out = np.empty(inputs.shape[1], np.float32)
    starts = np.arange(count + 1, dtype=np.int64) * inputs.shape[1]
    merged_map.map_stored(StoredBlock(inputs.reshape(-1), starts, inputs.shape[1], 0, GRAIN), out)
    return out


def draw_family(count: int) -> st.SearchStrategy[Any]:
    return arrays(np.float32, (count + 1, ELEMENTS), elements=NUMBERS)


def within(found: Any, honest: Any) -> bool:
    """Return whether each element is between the honest models, up to rounding of the differences to the base."""
    room = 4 * np.finfo(np.float32).eps * 8
    return bool(np.all(found >= honest.min(0) - room) and np.all(found <= honest.max(0) + room))


@pytest.mark.story
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
@given(data=st.data(), count=st.integers(3, 10), trim=st.floats(0, 0.49))
def test_a_minority_of_models_cannot_move_a_robust_mean_far(
    name: str, fused: bool, data: Any, count: int, trim: float
) -> None:
    """This holds for fewer than half of the models of a median, and for those that a trimmed mean leaves out."""
    base, *models = data.draw(draw_family(count))
    bad = data.draw(st.integers(1, (count - 1) // 2)) if name == "median" else int(trim * count)
    for number in range(bad):
        models[number] = data.draw(arrays(np.float32, ELEMENTS, elements=ABSURD))
    shared = {} if name == "median" else {"trim": trim}
    assert within(merged_block(name, base, models, fused=fused, **shared), np.stack(models[bad:]))

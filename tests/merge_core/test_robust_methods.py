"""Robust methods keep their promises for all models. The tests check properties instead of formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mergegate.merge_core.methods import Block, TensorTask, find_method, mask_key
from mergegate.merge_core.methods.contract import GRAIN, StoredBlock

ELEMENTS = 40
NUMBERS = st.floats(-4, 4, width=32)
HUGE = float(np.float32(1e30))
ABSURD = st.floats(-HUGE, HUGE, width=32)


def merged(name: str, base: Any, models: Any, *, fused: bool, own: dict[str, Any] | None = None, **shared: Any) -> Any:
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


def family(count: int) -> st.SearchStrategy[Any]:
    return arrays(np.float32, (count + 1, ELEMENTS), elements=NUMBERS)


def within(found: Any, honest: Any) -> bool:
    """Return whether each element is between the honest models, up to rounding of the differences to the base."""
    room = 4 * np.finfo(np.float32).eps * 8
    return bool(np.all(found >= honest.min(0) - room) and np.all(found <= honest.max(0) + room))


@pytest.mark.story
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
@given(data=st.data(), count=st.integers(3, 8))
def test_fewer_than_half_of_the_models_cannot_move_a_median_far(fused: bool, data: Any, count: int) -> None:
    base, *models = data.draw(family(count))
    bad = data.draw(st.integers(1, (count - 1) // 2))
    for number in range(bad):
        models[number] = data.draw(arrays(np.float32, ELEMENTS, elements=ABSURD))
    assert within(merged("median", base, models, fused=fused), np.stack(models[bad:]))


@pytest.mark.story
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
@given(data=st.data(), count=st.integers(3, 10), trim=st.floats(0, 0.49))
def test_trimmed_models_cannot_move_a_trimmed_mean_far(fused: bool, data: Any, count: int, trim: float) -> None:
    base, *models = data.draw(family(count))
    bad = int(trim * count)
    for number in range(bad):
        models[number] = data.draw(arrays(np.float32, ELEMENTS, elements=ABSURD))
    assert within(merged("trimmed_mean", base, models, fused=fused, trim=trim), np.stack(models[bad:]))


@pytest.mark.story
@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
@given(data=st.data(), count=st.integers(2, 6))
def test_the_order_of_models_does_not_matter_and_both_kernels_agree(name: str, data: Any, count: int) -> None:
    base, *models = data.draw(family(count))
    first = merged(name, base, models, fused=True)
    turned = data.draw(st.permutations(models))
    assert merged(name, base, turned, fused=True).tobytes() == first.tobytes()
    assert merged(name, base, models, fused=False).tobytes() == first.tobytes()


@pytest.mark.story
@given(data=st.data(), count=st.integers(2, 6), threshold=st.floats(0, 1))
def test_an_element_that_too_few_models_need_keeps_the_base(data: Any, count: int, threshold: float) -> None:
    base, *models = data.draw(family(count))
    own = {"weight": 1.0, "threshold": threshold}
    nobody = merged("consensus_ta", base, models, fused=True, own=own, agreement=count + 1)
    assert np.array_equal(nobody, base)
    alone = [models[0], *[base] * (count - 1)]
    assert np.array_equal(merged("consensus_ta", base, alone, fused=True, own=own), base)
    for fused in (False, True):
        found = merged("consensus_ta", base, models, fused=fused, own=own)
        total = base + sum(model - base for model in models)
        assert np.all((found == base) | np.isclose(found, total, rtol=1e-5, atol=1e-5))


@pytest.mark.story
@given(data=st.data(), count=st.integers(1, 5), density=st.floats(0.05, 1))
def test_stitching_two_equal_models_gives_that_model_where_elements_are_kept(
    data: Any, count: int, density: float
) -> None:
    base, model = data.draw(family(1))
    for fused in (False, True):
        own = {"weight": 0.7, "density": density}
        found = merged("localize_and_stitch", base, [model] * count, fused=fused, own=own)
        moved = found != base
        assert np.allclose(found[moved], model[moved], rtol=1e-5, atol=1e-5)
        kept = max(1, int(density * ELEMENTS))
        assert moved.sum() <= kept
        if count == 1 and moved.any() and (~moved).any():
            assert abs(model - base)[moved].min() >= abs(model - base)[~moved].max() - 1e-5

"""Test the simulation of workers in ``benchmarks/sweep_scale.py`` with bounds that hold for any schedule."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from benchmark_scripts import load_benchmark


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    return load_benchmark("sweep_scale")


def test_more_workers_never_take_less_than_their_share_or_the_barriers(scale: ModuleType) -> None:
    measured = scale.Measured((2.0,), ready=5.0, confirmation=(8.0,), overhead=0.0)
    sizes = [1, 7, 7, 4]
    one = scale.time_of(sizes, 1, measured, random.Random(0))
    assert one == 5 + 19 * 2 + 2 * 8
    for workers in (2, 4, 64):
        many = scale.time_of(sizes, workers, measured, random.Random(0))
        barriers = sum(-(-size // workers) * 2 for size in sizes) + 8  # each generation waits for its last trial
        assert barriers + 5 <= many <= barriers + 2 * 5
    assert scale.time_of(sizes, 64, measured, random.Random(0)) == scale.time_of(sizes, 7, measured, random.Random(0))


@pytest.mark.parametrize(("sampler", "population"), [("cma", None), ("random", 30)])
def test_the_model_uses_the_generations_of_the_product(scale: ModuleType, sampler: str, population: int | None) -> None:
    sizes = scale.generations(sampler, 14, 40, population)
    assert sizes[0] == 1  # the hand-written recipe
    assert sum(sizes) == 40
    assert sizes[1] == (30 if sampler == "random" else 14)  # CMA-ES: 4 + 3 ln 14, plus one random trial for every three

"""Run small versions of two benchmarks: sweeps over noise and with racing, and bounds for any number of workers."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from benchmark_scripts import load_benchmark


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    return load_benchmark("sweep_simulation")


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    return load_benchmark("sweep_scale")


@pytest.mark.story
def test_95_of_100_sweeps_of_noise_confirm_no_candidate(simulation: ModuleType) -> None:
    sizes = {"search": 100, "confirmation": 400}
    one = simulation.lies(simulation.KINDS["exact match, wide"], 100, sizes, budget={"trials": 20})
    assert one.confirmed <= 5
    # On the search set, where the winners are chosen, about half of them would be confirmed.
    assert one.on_search >= 10
    assert one.optimism > 0.04


@pytest.mark.parametrize("rule", ["paired", "halving"])
def test_racing_saves_documents_and_finds_an_equal_winner(rule: str, simulation: ModuleType) -> None:
    kind, documents = simulation.KINDS["exact match, wide"], {"search": 400, "confirmation": 400}
    scores: dict[str, list[float]] = {rule: [], "none": []}
    asked = dict.fromkeys(scores, 0)
    dropped = ahead = 0
    for seed in range(8):
        for one, found in scores.items():
            models = simulation.DrawnModels(kind, documents, seed)
            study = simulation.sweep(models, simulation.settings_of(kind, seed=seed, racing={"rule": one}))
            found.append(models.true_score(study.recipes[study.best.number]))
            asked[one] += models.asked
            dropped, ahead = dropped + models.ahead_dropped, ahead + models.ahead
    assert asked[rule] < (0.85 if rule == "paired" else 0.6) * asked["none"]
    assert sum(scores[rule]) / 8 > sum(scores["none"]) / 8 - 0.01
    assert dropped <= 0.05 * ahead


def test_more_workers_never_take_less_than_their_share_or_the_barriers(scale: ModuleType) -> None:
    measured = scale.Measured((2.0,), ready=5.0, confirmation=(8.0,), overhead=0.0)
    sizes = [1, 7, 7, 4]
    times = {workers: scale.time_of(sizes, workers, measured, random.Random(0)) for workers in (1, 2, 4, 7, 64)}
    assert times[1] == 5 + 19 * 2 + 2 * 8
    for workers in (2, 4, 64):
        barriers = sum(-(-size // workers) * 2 for size in sizes) + 8  # each generation waits for its last trial
        assert barriers + 5 <= times[workers] <= barriers + 2 * 5
    assert times[64] == times[7]


@pytest.mark.parametrize(("sampler", "population"), [("cma", None), ("random", 30)])
def test_the_model_uses_the_generations_of_the_product(scale: ModuleType, sampler: str, population: int | None) -> None:
    sizes = scale.generations(sampler, 14, 40, population)
    assert sizes[0] == 1  # the hand-written recipe
    assert sum(sizes) == 40
    assert sizes[1] == (30 if sampler == "random" else 14)  # CMA-ES: 4 + 3 ln 14, plus one random trial for every three

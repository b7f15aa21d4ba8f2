"""Run a small version of ``benchmarks/sweep_simulation.py``.

Sweeps over pure noise are not confirmed, and racing loses nothing.
"""

from __future__ import annotations

from types import ModuleType

import pytest
from benchmark_scripts import load_benchmark


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    return load_benchmark("sweep_simulation")


@pytest.mark.story
@pytest.mark.parametrize("sweeps", [40, pytest.param(100, marks=pytest.mark.story)])
def test_95_of_100_sweeps_of_noise_confirm_no_candidate(simulation: ModuleType, sweeps: int) -> None:
    one = simulation.lies(
        simulation.KINDS["exact match, wide"], sweeps, {"search": 100, "confirmation": 400}, budget={"trials": 20}
    )
    assert one.confirmed <= sweeps / 20
    # On the search set, where the winners are chosen, about half of them would be confirmed.
    assert one.on_search >= 0.1 * sweeps
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

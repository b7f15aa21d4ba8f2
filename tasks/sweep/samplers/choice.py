"""Which sampler a profile asks for, and how large its generations are."""

from __future__ import annotations

import math

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sweep.objective import Objective
from mergegate.tasks.sweep.samplers.contract import Sampler
from mergegate.tasks.sweep.samplers.evolution import EvolutionStrategy
from mergegate.tasks.sweep.samplers.optuna_search import OptunaSearch
from mergegate.tasks.sweep.samplers.random_search import RandomSearch
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import Space


def generation_size(dimensions: int, settings: SweepSettings) -> int:
    """Candidates of a generation: as asked for, else ``4 + 3 ln n`` (Hansen 2016), at least 6."""
    return settings.population or max(6, 4 + int(3 * math.log(max(1, dimensions))))


def make_sampler(space: Space, objective: Objective, settings: SweepSettings) -> Sampler:
    """The sampler of a sweep.

    Raises:
        InvalidInput: It is not installed, or cannot do what is asked of it.
    """
    size = generation_size(len(space.coordinates), settings)
    if settings.sampler == "random":
        return RandomSearch(space, settings.seed, size)
    if settings.sampler == "cma":
        if objective.several:
            raise InvalidInput(
                "sweep.sampler",
                found="cma, with several objectives",
                expected="a sampler that finds a front",
                remedy="sampler: nsga2, or several: false for their weighted sum",
            )
        return EvolutionStrategy(space, objective, settings.seed, settings.sigma, size)
    return OptunaSearch(space, objective, settings.sampler, settings.seed, size)


def make_baseline(space: Space, settings: SweepSettings) -> RandomSearch:
    """Random search beside the sampler, with a seed of its own."""
    return RandomSearch(space, settings.seed + 1_000_003, 1)

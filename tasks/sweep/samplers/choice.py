"""Create the sampler that a profile selects, and compute the size of its generations."""

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
    """Return the number of candidates in a generation.

    This is ``settings.population`` if set, else ``4 + 3 ln n`` for ``n`` dimensions (Hansen 2016), at least 6.
    """
    return settings.population or max(6, 4 + int(3 * math.log(max(1, dimensions))))


def make_sampler(space: Space, objective: Objective, settings: SweepSettings) -> Sampler:
    """Create the sampler of a sweep.

    Raises:
        InvalidInput: The package of the sampler is not installed, or the sampler does not support the objective.
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
    """Create the random search that runs alongside the sampler, with its own seed."""
    return RandomSearch(space, settings.seed + 1_000_003, 1)

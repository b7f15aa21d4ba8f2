"""Search with CMA-ES, from the package ``cmaes``.

CMA-ES samples from a normal distribution that starts around the hand-written values and moves toward better ones
(Hansen 2016, arXiv 1604.00772). If integers or categories are free too, the module uses CatCMA with margin (Hamano et
al. 2025, arXiv 2504.07884).

The strategy receives ranks instead of scores, so constraints are handled by Deb's rule and the unit of the scores does
not matter. When it has converged, it restarts at a random point with twice the population (IPOP: Auger & Hansen 2005).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.sweep.objective import Objective, rank
from mergegate.tasks.sweep.samplers.contract import TrialResult
from mergegate.tasks.sweep.samplers.optional_packages import installed
from mergegate.tasks.sweep.space import Space
from mergegate.tasks.sweep.trials import Point

_RESAMPLED = 10  # redraws per coordinate before a point outside the range is clipped to it
_AT_START = 0.5  # probability of the hand-written choice in the first generation


class EvolutionStrategy:
    """CMA-ES over the unit cube.

    Args:
        sigma: Initial step size, as a share of each range.
        size: Number of points in a generation.

    Raises:
        InvalidInput: The package ``cmaes`` is not installed.
    """

    def __init__(self, space: Space, objective: Objective, seed: int, sigma: float, size: int) -> None:
        self._cmaes = installed("cmaes")
        self._space, self._objective, self._sigma, self._size = space, objective, sigma, size
        self._rng = np.random.default_rng(seed)
        choices = [coordinate.choices for coordinate in space.coordinates]
        # An integer with two values is treated as a category, because there is no value between them.
        self._floats = [i for i, count in enumerate(choices) if not count]
        self._integers = [i for i, n in enumerate(choices) if n > 2 and space.coordinates[i].free.type == "integer"]
        self._categories = [i for i, n in enumerate(choices) if n > 1 and i not in self._integers]
        self._asked: list[Any] = []
        self._strategy = self._new(space.encode(space.start))

    def begin(self, start: TrialResult) -> None:
        """Ignore the result, because the start is the mean of the first generation and not a draw from it."""

    def ask(self) -> list[Point]:
        """Return the next generation of points."""
        self._asked = [self._strategy.ask() for _ in range(self._strategy.population_size)]
        return [self._space.decode(self._unit(draw)) for draw in self._asked]

    def tell(self, scored: Sequence[TrialResult]) -> None:
        """Update the distribution, and restart it if it has converged."""
        ranks = rank([result.scores for result in scored], [result.violation for result in scored], self._objective)
        self._strategy.tell([(draw, float(position)) for draw, position in zip(self._asked, ranks, strict=True)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # With categories only, cmaes warns that it has no stopping rule.
            is_over = self._strategy.should_stop()
        if is_over:
            self._size *= 2
            self._strategy = self._new(self._rng.random(len(self._space.coordinates)))

    def _new(self, mean: NDArray[np.float64]) -> Any:
        seed = int(self._rng.integers(2**31))
        if not self._integers and not self._categories:
            return self._cmaes.CMA(
                mean=mean.copy(),
                sigma=self._sigma,
                bounds=np.tile([0.0, 1.0], (len(mean), 1)),
                seed=seed,
                population_size=self._size,
                n_max_resampling=_RESAMPLED * len(mean),
            )
        counts = {i: self._space.coordinates[i].choices for i in (*self._integers, *self._categories)}
        middle = np.array([*mean[self._floats], *(mean[i] * counts[i] - 0.5 for i in self._integers)])
        width = np.array([1.0] * len(self._floats) + [counts[i] - 1.0 for i in self._integers])
        gaussian = {"mean": middle, "sigma": self._sigma, "cov": np.diag(width**2)} if len(middle) else {}
        return self._cmaes.CatCMAwM(
            x_space=[[0.0, 1.0]] * len(self._floats) or None,
            z_space=[list(range(counts[i])) for i in self._integers] or None,
            c_space=[counts[i] for i in self._categories] or None,
            cat_param=self._chances(mean, counts) if self._categories else None,
            population_size=self._size,
            seed=seed,
            **gaussian,
        )

    def _chances(self, mean: NDArray[np.float64], counts: dict[int, int]) -> NDArray[np.float64]:
        """Return the probability of each choice, ``[categories, largest number of choices]``."""
        chances = np.zeros((len(self._categories), max(counts[i] for i in self._categories)))
        for row, i in enumerate(self._categories):
            chances[row, : counts[i]] = (1 - _AT_START) / (counts[i] - 1)
            chances[row, min(int(mean[i] * counts[i]), counts[i] - 1)] = _AT_START
        return chances

    def _unit(self, draw: Any) -> NDArray[np.float64]:
        if isinstance(draw, np.ndarray):
            return draw
        unit = np.full(len(self._space.coordinates), 0.5)
        if self._floats:
            unit[self._floats] = draw.x
        for i, value in zip(self._integers, draw.z if self._integers else (), strict=True):
            unit[i] = (value + 0.5) / self._space.coordinates[i].choices
        for i, one_hot in zip(self._categories, draw.c if self._categories else (), strict=True):
            unit[i] = (int(np.argmax(one_hot)) + 0.5) / self._space.coordinates[i].choices
        return unit

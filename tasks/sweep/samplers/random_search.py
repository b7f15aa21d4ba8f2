"""Draw points uniformly from the whole space. Random search is the baseline of every report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mergegate.tasks.sweep.samplers.contract import TrialResult
from mergegate.tasks.sweep.space import Space
from mergegate.tasks.sweep.trials import Point


class RandomSearch:
    """Uniform draws that do not depend on earlier results.

    Args:
        size: Number of points in a generation.
    """

    def __init__(self, space: Space, seed: int, size: int) -> None:
        self._space, self._size = space, size
        self._rng = np.random.default_rng(seed)

    def begin(self, start: TrialResult) -> None:
        """Ignore the result, because draws do not depend on it."""

    def ask(self) -> list[Point]:
        """Return the next ``size`` points."""
        return self.draw(self._size)

    def draw(self, count: int) -> list[Point]:
        """Return the next ``count`` points. Two calls draw the same points as one call for their sum."""
        return [self._space.decode(self._rng.random(len(self._space.coordinates))) for _ in range(count)]

    def tell(self, scored: Sequence[TrialResult]) -> None:
        """Ignore the results, because draws do not depend on them."""

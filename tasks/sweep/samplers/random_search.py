"""Random search: every point is drawn alike from the whole space. The baseline of every report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mergegate.tasks.sweep.samplers.contract import TrialResult
from mergegate.tasks.sweep.space import Space
from mergegate.tasks.sweep.trials import Point


class RandomSearch:
    """Draws that know nothing of what was found.

    Args:
        size: Points of a generation.
    """

    def __init__(self, space: Space, seed: int, size: int) -> None:
        self._space, self._size = space, size
        self._rng = np.random.default_rng(seed)

    def begin(self, start: TrialResult) -> None:
        """Nothing is made of it."""

    def ask(self) -> list[Point]:
        """``size`` points."""
        return self.draw(self._size)

    def draw(self, count: int) -> list[Point]:
        """The next ``count`` points; those of two calls are those of one."""
        return [self._space.decode(self._rng.random(len(self._space.coordinates))) for _ in range(count)]

    def tell(self, scored: Sequence[TrialResult]) -> None:
        """Nothing is made of it."""

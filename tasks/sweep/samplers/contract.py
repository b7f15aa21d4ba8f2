"""Define the sampler protocol: propose a generation of points, then receive their scores.

A sampler is seeded and deterministic. After the same scores in the same order it proposes the same points. Its state is
therefore never stored, and a killed search is replayed from its scored trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mergegate.tasks.sweep.trials import Point


class TrialResult(NamedTuple):
    """A point and its scores.

    Args:
        scores: One number per objective. More is better. NaN: the point has no score and counts as the worst.
        violation: Sum of all constraint violations. 0: feasible.
    """

    point: Point
    scores: tuple[float, ...]
    violation: float = 0.0


class Sampler(Protocol):
    """Source of the next generation of candidates."""

    def begin(self, start: TrialResult) -> None:
        """Receive the result of the hand-written values, once, before the first generation."""

    def ask(self) -> list[Point]:
        """Return the next generation. Call :meth:`tell` with all of its results before asking for another one."""

    def tell(self, scored: Sequence[TrialResult]) -> None:
        """Receive the results of a generation, in the order of its points."""

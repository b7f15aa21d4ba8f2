"""What a sampler is: asked for a generation of points, told what they scored.

A sampler is seeded, and decided by what it was told: the same told in the same order, it asks for the same points. So
nothing of it is stored; a killed search is replayed from its scored trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mergegate.tasks.sweep.trials import Point


class TrialResult(NamedTuple):
    """What a point scored.

    Args:
        scores: One number an objective; more is better. NaN: there is none, and it counts as the worst.
        violation: By how much constraints are missed; 0: feasible.
    """

    point: Point
    scores: tuple[float, ...]
    violation: float = 0.0


class Sampler(Protocol):
    """Where the next generation comes from."""

    def begin(self, start: TrialResult) -> None:
        """What the hand-written values scored; said once, before the first generation."""

    def ask(self) -> list[Point]:
        """The next generation; all of it is told before the next is asked for."""

    def tell(self, scored: Sequence[TrialResult]) -> None:
        """What the generation scored, in the order in which it was asked."""

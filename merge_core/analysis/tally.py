"""Store the sums from which cosines, conflicts and distances of task vectors are computed.

A task vector is the difference between a model and the model it was fine-tuned from (Ilharco et al. 2023, arXiv
2212.04089). Tallies can be added: the tallies of the tensors in a layer add up to the tally of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import combinations

from pydantic import BaseModel, ConfigDict


class Tally(BaseModel):
    """Sums over ``elements`` weights that describe how far ``vectors`` task vectors agree.

    ``gram`` is symmetric, ``[vectors, vectors]``. If there is a merge, a last row and column stand for its difference
    from the origin. ``pair_moved`` and ``pair_opposed`` are in the order of :attr:`pairs`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    elements: int
    vectors: int
    origin: float  # sum of squares of the origin's weights
    gram: tuple[tuple[float, ...], ...]  # inner products of the differences between models and origin
    moved: int  # weights that at least two task vectors move noticeably
    opposed: int  # of these, weights that two task vectors move in opposite directions
    pair_moved: tuple[int, ...]  # ``moved`` and ``opposed`` for each pair
    pair_opposed: tuple[int, ...]

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            elements=self.elements + other.elements,
            vectors=self.vectors,
            origin=self.origin + other.origin,
            gram=tuple(_add(left, right) for left, right in zip(self.gram, other.gram, strict=True)),
            moved=self.moved + other.moved,
            opposed=self.opposed + other.opposed,
            pair_moved=_add(self.pair_moved, other.pair_moved),
            pair_opposed=_add(self.pair_opposed, other.pair_opposed),
        )

    @property
    def has_merge(self) -> bool:
        """Whether the tally includes a merge."""
        return len(self.gram) > self.vectors

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs of task vector numbers: (0, 1), (0, 2), ..., (1, 2), ..."""
        return tuple(combinations(range(self.vectors), 2))

    def norm(self, vector: int) -> float:
        """Return the L2 norm of a task vector."""
        return math.sqrt(self.gram[vector][vector])

    def length(self, vector: int) -> float | None:
        """Return the L2 norm of a task vector divided by that of the origin, or None if the origin is zero."""
        return self._relative(self.gram[vector][vector])

    def cosine(self, first: int, second: int) -> float | None:
        """Return the cosine of two task vectors (-1 to 1), or None if one of them is zero."""
        norms = self.norm(first) * self.norm(second)
        return max(-1.0, min(1.0, self.gram[first][second] / norms)) if norms else None

    @property
    def conflict(self) -> float | None:
        """Share (0 to 1) of weights that move in opposite directions, among those that several task vectors move.

        Two unrelated task vectors conflict in half of the weights that both move. None if there are no such weights.
        """
        return self.opposed / self.moved if self.moved else None

    def pair_conflict(self, first: int, second: int) -> float | None:
        """Return the :attr:`conflict` of two task vectors alone."""
        index = self.pairs.index((min(first, second), max(first, second)))
        return self.pair_opposed[index] / self.pair_moved[index] if self.pair_moved[index] else None

    @property
    def merge_length(self) -> float | None:
        """Distance of the merge from the origin, divided by the L2 norm of the origin. None without a merge."""
        return self._relative(self.gram[-1][-1]) if self.has_merge else None

    def merge_distance(self, vector: int) -> float | None:
        """Return the distance of the merge from parent ``vector``, divided by the L2 norm of the origin."""
        if not self.has_merge:
            return None
        merge_square, cross, vector_square = self.gram[-1][-1], self.gram[-1][vector], self.gram[vector][vector]
        return self._relative(max(0.0, merge_square - 2 * cross + vector_square))

    def _relative(self, square: float) -> float | None:
        return math.sqrt(square / self.origin) if self.origin else None


def total(tallies: Sequence[Tally]) -> Tally:
    """Add up one or more tallies."""
    return reduce(Tally.__add__, tallies)


def _add(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))

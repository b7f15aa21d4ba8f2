"""Add up the sums over a set of weights that describe how task vectors agree.

A task vector is the difference between a model and the model it was fine-tuned from (Ilharco et al. 2023, arXiv
2212.04089). All ratios are derived from the sums, and the sums of two sets add up to the sums of both. So the tally
of a layer, a kind of tensor or the whole model is found by addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import combinations

from pydantic import BaseModel, ConfigDict


class Tally(BaseModel):
    """Sums over a set of ``elements`` weights that describe how ``vectors`` task vectors agree.

    ``gram`` is symmetric. It has the shape ``[vectors, vectors]``, plus a last row and column for the difference
    between merge and origin if there is a merge. Pairs are in the order of ``itertools.combinations``: (0, 1), (0, 2),
    ..., (1, 2), ...
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    elements: int
    vectors: int
    origin: float  # sum of squares of the origin's weights
    gram: tuple[tuple[float, ...], ...]  # inner products of the differences from the origin
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
        """Whether the merge was tallied with its parents."""
        return len(self.gram) > self.vectors

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs of task vectors."""
        return tuple(combinations(range(self.vectors), 2))

    def norm(self, vector: int) -> float:
        """Return the L2 norm of a task vector."""
        return math.sqrt(self.gram[vector][vector])

    def length(self, vector: int) -> float | None:
        """Return the L2 norm of a task vector relative to the origin's, or None if the origin is zero."""
        return self._relative(self.gram[vector][vector])

    def cosine(self, first: int, second: int) -> float | None:
        """Return the cosine of the angle between two task vectors, -1 to 1, or None if one of them is zero."""
        norms = self.norm(first) * self.norm(second)
        return max(-1.0, min(1.0, self.gram[first][second] / norms)) if norms else None

    @property
    def conflict(self) -> float | None:
        """Share, 0 to 1, of conflicting weights among the weights that two or more task vectors move.

        A weight is in conflict if two task vectors move it in opposite directions. Two unrelated task vectors conflict
        in half of the weights that both move.
        """
        return self.opposed / self.moved if self.moved else None

    def pair_conflict(self, first: int, second: int) -> float | None:
        """Return the share of conflicting weights among the weights that two task vectors both move."""
        index = self.pairs.index((min(first, second), max(first, second)))
        return self.pair_opposed[index] / self.pair_moved[index] if self.pair_moved[index] else None

    @property
    def merge_length(self) -> float | None:
        """Distance of the merge from the origin, as an L2 norm relative to the origin's norm."""
        return self._relative(self.gram[-1][-1]) if self.has_merge else None

    def merge_distance(self, vector: int) -> float | None:
        """Return the distance between the merge and the parent of a task vector, relative to the origin's L2 norm."""
        if not self.has_merge:
            return None
        merge_square, cross, vector_square = self.gram[-1][-1], self.gram[-1][vector], self.gram[vector][vector]
        return self._relative(max(0.0, merge_square - 2 * cross + vector_square))

    def _relative(self, square: float) -> float | None:
        return math.sqrt(square / self.origin) if self.origin else None


def total(tallies: Sequence[Tally]) -> Tally:
    """Return the tally of all sets together. At least one tally is required."""
    return reduce(Tally.__add__, tallies)


def _add(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))

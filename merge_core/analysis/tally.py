"""Sums over a set of weights that say how task vectors agree; those of two sets add up to those of both.

A task vector is the difference of a model to the model that it was made from (Ilharco et al. 2023, arXiv 2212.04089).
All ratios are derived from the sums, so layers, kinds and the whole model are tallied by addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import combinations

from pydantic import BaseModel, ConfigDict


class Tally(BaseModel):
    """Sums over ``elements`` weights of ``vectors`` task vectors and, where there is a merge, of its own difference.

    ``gram`` is symmetric, ``[vectors, vectors]`` or, with the merge as its last row, one more each way. Pairs are
    those of ``itertools.combinations``: (0, 1), (0, 2), ..., (1, 2), ...
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    elements: int
    vectors: int
    origin: float  # sum of squares of the origin's weights
    gram: tuple[tuple[float, ...], ...]  # products of differences to the origin
    moved: int  # weights that at least two task vectors move noticeably
    opposed: int  # those of them that two task vectors move in opposite directions
    pair_moved: tuple[int, ...]  # the same for each pair
    pair_opposed: tuple[int, ...]

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            elements=self.elements + other.elements,
            vectors=self.vectors,
            origin=self.origin + other.origin,
            gram=tuple(_added(mine, theirs) for mine, theirs in zip(self.gram, other.gram, strict=True)),
            moved=self.moved + other.moved,
            opposed=self.opposed + other.opposed,
            pair_moved=_added(self.pair_moved, other.pair_moved),
            pair_opposed=_added(self.pair_opposed, other.pair_opposed),
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
        """L2 norm of a task vector."""
        return math.sqrt(self.gram[vector][vector])

    def length(self, vector: int) -> float | None:
        """L2 norm of a task vector over that of the origin; None where the origin is zero."""
        return self._relative(self.gram[vector][vector])

    def cosine(self, one: int, other: int) -> float | None:
        """Cosine of the angle between two task vectors, -1 to 1; None where one of them is zero."""
        norms = self.norm(one) * self.norm(other)
        return max(-1.0, min(1.0, self.gram[one][other] / norms)) if norms else None

    @property
    def conflict(self) -> float | None:
        """Share, 0 to 1, of the weights moved by two or more task vectors that are moved in opposite directions.

        Two task vectors that have nothing to do with each other conflict in half of them.
        """
        return self.opposed / self.moved if self.moved else None

    def pair_conflict(self, one: int, other: int) -> float | None:
        """The same for two task vectors."""
        at = self.pairs.index((min(one, other), max(one, other)))
        return self.pair_opposed[at] / self.pair_moved[at] if self.pair_moved[at] else None

    @property
    def merge_length(self) -> float | None:
        """How far the merge moved from the origin: L2 norm of the difference over that of the origin."""
        return self._relative(self.gram[-1][-1]) if self.has_merge else None

    def merge_distance(self, vector: int) -> float | None:
        """How far the merge is from the model at the end of a task vector: L2 norm over that of the origin."""
        if not self.has_merge:
            return None
        own, cross, theirs = self.gram[-1][-1], self.gram[-1][vector], self.gram[vector][vector]
        return self._relative(max(0.0, own - 2 * cross + theirs))

    def _relative(self, square: float) -> float | None:
        return math.sqrt(square / self.origin) if self.origin else None


def total(tallies: Sequence[Tally]) -> Tally:
    """The tally of all sets together; there is at least one."""
    return reduce(Tally.__add__, tallies)


def _added(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))

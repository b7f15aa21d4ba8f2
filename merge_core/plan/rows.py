"""Where each row of an output table of tokens comes from, in one model: arrays, not one object a row.

Neighbours in the output are mostly neighbours in a file. So the map is kept as *runs*: stretches of output rows that
are consecutive rows of one model, or all zeros, or all the mean. A union of siblings has a handful of them, whatever
the size of its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# In the place of a lender's number.
SEVERAL = -1  # the mean of the rows of several models; ``row`` is then the place in ``shared``
ZERO = -2
MEAN = -3  # the mean of all rows of the model's own table


@dataclass(frozen=True, eq=False)
class RowMap:
    """Where a model's rows for the output come from.

    Args:
        models: Those that lend rows, by reference; the model itself is one of them.
        own: The model's own place among them.
        lender: For each output row a place in ``models``, or one of the above [n].
        row: The lender's row [n].
        shared: For rows that are the mean of several, those (place in ``models``, row).
    """

    models: tuple[str, ...]
    own: int
    lender: NDArray[np.int32]
    row: NDArray[np.int64]
    shared: tuple[tuple[tuple[int, int], ...], ...] = ()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RowMap)
            and (self.models, self.own, self.shared) == (other.models, other.own, other.shared)
            and np.array_equal(self.lender, other.lender)
            and np.array_equal(self.row, other.row)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def __len__(self) -> int:
        return len(self.lender)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First output row of each run, and the number of rows at the end."""
        same = self.lender[1:] == self.lender[:-1]
        follows = self.row[1:] == self.row[:-1] + 1
        alike = (self.lender[1:] == ZERO) | (self.lender[1:] == MEAN)
        breaks = np.flatnonzero(~(same & (follows | alike))) + 1
        return np.concatenate([[0], breaks, [len(self)]]).astype(np.int64)

    @cached_property
    def lenders(self) -> frozenset[str]:
        """Models whose rows are read."""
        single = {self.models[number] for number in np.unique(self.lender).tolist() if number >= 0}
        return frozenset(single | {self.models[number] for rows in self.shared for number, _ in rows})

    def keeps(self, row: int) -> bool:
        """Whether the model's own ``row`` is in the output as its own."""
        return bool(np.any((self.lender == self.own) & (self.row == row)))


def map_rows(
    own: int, ids: NDArray[np.int64], preferred: int | None
) -> tuple[NDArray[np.int32], NDArray[np.int64], list[tuple[tuple[int, int], ...]]]:
    """Lender, row and shared rows of the tokens of a vocabulary, by the rule for tokens that a model lacks.

    Its own row; else that of the ``preferred`` model if it has one; else of the only one that has; else the mean over
    those that have.

    Args:
        own: The model that the rows are for, by its place among the models.
        ids: Row of each token in each model [models, tokens]; -1: it has none.
        preferred: The base's place.

    Returns:
        As in :class:`RowMap`; tokens that nobody has are ``MEAN``.
    """
    has = ids >= 0
    count = has.sum(0)
    tokens = ids.shape[1]
    lender = np.full(tokens, MEAN, np.int32)
    row = np.zeros(tokens, np.int64)
    one = count == 1
    lender[one] = has[:, one].argmax(0)
    several = count > 1
    lender[several] = SEVERAL
    for number in (preferred, own):
        if number is not None:
            lender[has[number]] = number
    single = np.flatnonzero(lender >= 0)
    row[single] = ids[lender[single], single]
    shared: dict[tuple[tuple[int, int], ...], int] = {}
    for token in np.flatnonzero(lender == SEVERAL).tolist():
        rows = tuple((int(number), int(ids[number, token])) for number in np.flatnonzero(has[:, token]))
        row[token] = shared.setdefault(rows, len(shared))
    return lender, row, list(shared)

"""Map each row of an output token table to the row that a model contributes, as arrays instead of one object per row.

Neighboring rows of the output are mostly neighbors in a file too. :attr:`RowMap.starts` therefore divides the map into
*runs*: stretches of output rows that are consecutive rows of one model, all zeros, or all the mean. A union of related
vocabularies has only a handful of runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Values in ``RowMap.lender`` that are not the index of a model.
SEVERAL = -1  # Mean of the rows of several models; ``row`` is then an index into ``shared``.
ZERO = -2
MEAN = -3  # Mean of all rows of the model's own table.


@dataclass(frozen=True, eq=False)
class RowMap:
    """The source of each row that one model contributes to an output table.

    Args:
        models: References of the models that lend rows, including the contributing model.
        own: Index of the contributing model in ``models``.
        lender: Index in ``models`` for each output row, or ``SEVERAL``, ``ZERO`` or ``MEAN`` [n].
        row: Row in the lender's table [n].
        shared: Rows to average for each ``SEVERAL`` entry, as pairs of an index in ``models`` and a row.
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

    __hash__ = None  # type: ignore[assignment]  # Arrays are not hashable.

    def __len__(self) -> int:
        return len(self.lender)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First output row of each run, followed by the total number of rows."""
        same = self.lender[1:] == self.lender[:-1]
        follows = self.row[1:] == self.row[:-1] + 1
        is_constant = (self.lender[1:] == ZERO) | (self.lender[1:] == MEAN)
        breaks = np.flatnonzero(~(same & (follows | is_constant))) + 1
        return np.concatenate([[0], breaks, [len(self)]]).astype(np.int64)


def map_rows(
    own_index: int, ids: NDArray[np.int64], base_index: int | None
) -> tuple[NDArray[np.int32], NDArray[np.int64], list[tuple[tuple[int, int], ...]]]:
    """Return the lender, row and shared rows for each token of a vocabulary, from the perspective of one model.

    The model uses its own row. If it has none, it uses the row of the base, then that of the only model that has one,
    then the mean over all models that have one.

    Args:
        own_index: Index of the model.
        ids: Row of each token in each model, or -1 for none [models, tokens].
        base_index: Index of the base, if there is one.

    Returns:
        Lender, row and shared rows as in :class:`RowMap`. The lender of a token without any row is ``MEAN``.
    """
    has = ids >= 0
    count = has.sum(0)
    tokens = ids.shape[1]
    lender = np.full(tokens, MEAN, np.int32)
    row = np.zeros(tokens, np.int64)
    has_single = count == 1
    lender[has_single] = has[:, has_single].argmax(0)
    several = count > 1
    lender[several] = SEVERAL
    for number in (base_index, own_index):
        if number is not None:
            lender[has[number]] = number
    single = np.flatnonzero(lender >= 0)
    row[single] = ids[lender[single], single]
    shared: dict[tuple[tuple[int, int], ...], int] = {}
    for token in np.flatnonzero(lender == SEVERAL).tolist():
        rows = tuple((int(number), int(ids[number, token])) for number in np.flatnonzero(has[:, token]))
        row[token] = shared.setdefault(rows, len(shared))
    return lender, row, list(shared)

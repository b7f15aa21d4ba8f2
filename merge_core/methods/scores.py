"""Define scores of elements and requests for their k largest.

:mod:`.selection` and :mod:`.windows` search for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mergegate.merge_core.methods.contract import Array, Block, StoredBlock, load_kernels

if TYPE_CHECKING:
    import torch

# Digits of a non-negative float without its sign bit, from the most significant: (shift, width).
DIGITS = {"float32": ((15, 16), (0, 15)), "float64": ((47, 16), (31, 16), (15, 16), (0, 15))}


@dataclass(frozen=True)
class SelectionRequest:
    """Request for the ``k`` largest scores of a stream.

    Args:
        stream: Index of the stream.
        k: Number of scores, from 1 to all. None: the share ``of_positive`` of the positive scores.
        of_positive: Share for ``k``, rounded down to a whole number of scores.
        numbered: Whether ties must be numbered. If not, only the k-th largest score itself is needed.
    """

    stream: int
    k: int | None
    of_positive: float = 0.0
    numbered: bool = True

    def resolve_k(self, positive: int) -> int:
        """Return the number of requested scores if the stream has ``positive`` positive ones."""
        return int(int(positive) * self.of_positive) if self.k is None else self.k


@dataclass(frozen=True)
class StoredScores:
    """Fused counterparts of the passes, which compute scores from stored blocks and count them.

    Args:
        scores: Function that computes float32 scores ``[streams, elements]``.
        count_first_digits: Function that counts leading digits: ``[streams, bins]``.
        count_next_digits: Function that counts the next digit, from (block, streams, prefixes, shift, width):
            ``[requests, bins]``.
        count_ties: Function that counts ties, from (block, streams, keys): ``[grains, requests]``.
    """

    scores: Callable[[StoredBlock], Array]
    count_first_digits: Callable[[StoredBlock], Array]
    count_next_digits: Callable[[StoredBlock, Array, Array, int, int], Array]
    count_ties: Callable[[StoredBlock, Array, Array], Array]


@dataclass(frozen=True)
class ScoreFunction:
    """Computation of non-negative scores of the elements of a tensor, in one or more streams.

    Args:
        score_block: Function that computes the scores ``[streams, elements]`` of a block.
        dtype: Data type of the scores.
        stored: Fused counterparts. None if there are none.
    """

    score_block: Callable[[Block], torch.Tensor]
    dtype: Literal["float32", "float64"]
    stored: StoredScores | None = None


def count_stored_scores(scores: Callable[[StoredBlock], Array]) -> StoredScores:
    """Return the counters for a function that computes float32 ``[streams, elements]`` from a stored block."""
    shift, width = DIGITS["float32"][0]
    return StoredScores(
        scores,
        count_first_digits=lambda block: load_kernels().first_digit_of(scores(block), shift, 1 << width),
        count_next_digits=lambda block, *prefix: load_kernels().next_digit_of(scores(block), *prefix),
        count_ties=lambda block, *keys: load_kernels().ties_of(scores(block), block.grain, *keys),
    )


def score_bits(scores: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns (int64) of non-negative scores. They order like the scores, with NaN above everything."""
    import torch

    integer_type = torch.int32 if scores.dtype == torch.float32 else torch.int64
    # Adding 0 turns -0.0, whose pattern is negative, into 0.0.
    return (scores + 0.0).contiguous().view(integer_type).long()

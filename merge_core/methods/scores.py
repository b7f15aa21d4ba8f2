"""Define the scores of elements, and requests for the largest scores that :mod:`.selection` answers."""

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
        k: Number of scores to select, at least 1. None: the share ``of_positive``.
        of_positive: Share of the positive scores to select, rounded down to a whole number of scores.
        numbered: Whether some ties may have to be selected. If not, only the k-th largest score itself is needed.
    """

    stream: int
    k: int | None
    of_positive: float = 0.0
    numbered: bool = True

    def resolve_k(self, positive: int) -> int:
        """Return the number of scores to select from a stream with ``positive`` positive scores."""
        return int(int(positive) * self.of_positive) if self.k is None else self.k


@dataclass(frozen=True)
class StoredScores:
    """Fused functions that compute scores from stored blocks, or count them without storing them.

    Args:
        scores: Function that returns the float32 scores ``[streams, elements]``.
        count_first_digits: Function that counts the leading digits: ``[streams, bins]``.
        count_next_digits: Function of (block, streams, prefixes, shift, width) that counts the next digits:
            ``[requests, bins]``.
        count_ties: Function of (block, streams, keys) that counts ties: ``[grains, requests]``.
    """

    scores: Callable[[StoredBlock], Array]
    count_first_digits: Callable[[StoredBlock], Array]
    count_next_digits: Callable[[StoredBlock, Array, Array, int, int], Array]
    count_ties: Callable[[StoredBlock, Array, Array], Array]


@dataclass(frozen=True)
class ScoreFunction:
    """Function that assigns one or more non-negative scores (streams) to each element of a tensor.

    Args:
        score_block: Function that returns the scores of a block: ``[streams, elements]``.
        dtype: Data type of the scores.
        stored: Fused counterparts, or None.
    """

    score_block: Callable[[Block], torch.Tensor]
    dtype: Literal["float32", "float64"]
    stored: StoredScores | None = None


def count_stored_scores(scores: Callable[[StoredBlock], Array]) -> StoredScores:
    """Return the fused functions that count scores, which ``scores`` computes as float32 ``[streams, elements]``."""
    shift, width = DIGITS["float32"][0]
    return StoredScores(
        scores,
        count_first_digits=lambda block: load_kernels().first_digit_of(scores(block), shift, 1 << width),
        count_next_digits=lambda block, *prefix: load_kernels().next_digit_of(scores(block), *prefix),
        count_ties=lambda block, *keys: load_kernels().ties_of(scores(block), block.grain, *keys),
    )


def score_bits(scores: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns of non-negative scores as int64. They have the order of the scores; NaN is largest."""
    import torch

    integer_type = torch.int32 if scores.dtype == torch.float32 else torch.int64
    # Adding 0 turns -0.0, whose pattern is negative, into 0.0.
    return (scores + 0.0).contiguous().view(integer_type).long()

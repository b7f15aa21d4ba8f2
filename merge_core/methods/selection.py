"""Find the k largest of many scores exactly, without sorting or storing them: a radix select over blocks.

For large tensors one pass is enough if :mod:`.windows` guesses well. Otherwise digits are counted, because non-negative
floats compare like their bit patterns. One pass counts the leading 16 bits of every score. The next pass counts the
next bits of the scores in the bin that contains the k-th largest, and so on until the k-th largest score is known (two
passes in float32, four in float64).

If several scores equal the k-th largest, only some of them may be selected so that exactly k remain. Differences of
bfloat16 weights have masses of ties, so selecting all of them, or the first ones, would give neither k elements nor an
even spread over the tensor. Therefore ties are numbered in element order, and a tie is selected if a golden-ratio
stride maps its number below the quota. The selection is exact, evenly spread, independent of blocks, and nested: a
smaller k selects a subset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mergegate.merge_core.methods.contract import Block, Fold, StoredBlock, fold_counts, fold_grains
from mergegate.merge_core.methods.windows import LARGE, guess_windows, locate, scan

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.methods.contract import Array

# Digits of a non-negative float without its sign bit, from the most significant: (shift, width).
DIGITS = {
    "float32": ((15, 16), (0, 15)),
    "float64": ((47, 16), (31, 16), (15, 16), (0, 15)),
}


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


@dataclass(frozen=True)
class SelectionThreshold:
    """Result of a selection request.

    Args:
        key: Bit pattern of the k-th largest score. All larger scores are selected.
        quota: Number of scores equal to it that are selected.
        tied: Number of scores equal to it.
        before: Number of ties before each grain. Empty if all ties are selected.
    """

    key: int
    quota: int
    tied: int
    before: Array

    @property
    def stride(self) -> int:
        """Step coprime to ``tied`` near its golden section. ``rank * stride % tied`` visits every number once."""
        step = max(1, round(self.tied * 0.6180339887498949))
        while math.gcd(step, self.tied) != 1:
            step += 1
        return step


_GROUP = 256  # bins


NOTHING = SelectionThreshold(2**31, 0, 0, np.empty(0, np.int64))


@dataclass(frozen=True)
class Counters:
    """Fused counterparts of the passes, which count in stored blocks.

    Args:
        scores: Computes float32 scores ``[streams, elements]``.
        first: Counts leading digits: ``[streams, bins]``.
        later: Counts the next digit, from (block, streams, prefixes, shift, width): ``[requests, bins]``.
        ties: Counts ties, from (block, streams, keys): ``[grains, requests]``.
    """

    scores: Callable[[StoredBlock], Array]
    first: Callable[[StoredBlock], Array]
    later: Callable[[StoredBlock, Array, Array, int, int], Array]
    ties: Callable[[StoredBlock, Array, Array], Array]


@dataclass(frozen=True)
class ScoreFunction:
    """Function that computes non-negative scores ``[streams, elements]``, with its data type and fused counters."""

    of: Callable[[Block], torch.Tensor]
    dtype: Literal["float32", "float64"]
    fused: Counters | None = None


def counters(scores: Callable[[StoredBlock], Array]) -> Counters:
    """Return the counters for a function that computes float32 ``[streams, elements]`` from a stored block."""

    def first(block: StoredBlock) -> Array:
        from mergegate.merge_core.methods import kernels

        shift, width = DIGITS["float32"][0]
        return np.asarray(kernels.first_digit_of(scores(block), shift, 1 << width))

    def later(block: StoredBlock, streams: Array, prefixes: Array, shift: int, width: int) -> Array:
        from mergegate.merge_core.methods import kernels

        return np.asarray(kernels.next_digit_of(scores(block), streams, prefixes, shift, width))

    def ties(block: StoredBlock, streams: Array, keys: Array) -> Array:
        from mergegate.merge_core.methods import kernels

        return np.asarray(kernels.ties_of(scores(block), block.grain, streams, keys))

    return Counters(scores, first, later, ties)


def bits(scores: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns (int64) of non-negative scores. They order like the scores, with NaN above everything."""
    import torch

    integer_type = torch.int32 if scores.dtype == torch.float32 else torch.int64
    # Adding 0 turns -0.0, whose pattern is negative, into 0.0.
    return (scores + 0.0).contiguous().view(integer_type).long()


def select(
    scores: ScoreFunction, requests: Sequence[SelectionRequest], numel: int
) -> Generator[Fold, Any, list[SelectionThreshold]]:
    """Yield the fold passes that answer ``requests`` about ``numel`` scores. Use it with ``yield from``.

    A request for a share of the positive scores that rounds down to zero scores is answered with :data:`NOTHING`.
    """
    if numel >= LARGE:
        thresholds_by_window = yield from _select_by_windows(scores, requests, numel)
        if thresholds_by_window is not None:
            return thresholds_by_window
    if any(request.k is None for request in requests):
        positive = yield _count_positive(scores)
        requests = [replace(request, k=_resolve_k(request, positive[request.stream])) for request in requests]
    positive_requests = [request for request in requests if request.k]
    thresholds = iter((yield from _select_by_digits(scores, positive_requests)) if positive_requests else [])
    return [next(thresholds) if request.k else NOTHING for request in requests]


def _resolve_k(request: SelectionRequest, positive: int) -> int:
    return int(int(positive) * request.of_positive) if request.k is None else request.k


def _select_by_windows(
    scores: ScoreFunction, requests: Sequence[SelectionRequest], numel: int
) -> Generator[Fold, Any, list[SelectionThreshold] | None]:
    """Select with windows. Return None if a result is outside the window that was guessed for it."""
    windows = yield from guess_windows(scores, requests, numel)
    states = (yield from scan(scores, windows)) if windows else []
    if not states:
        return None
    cuts = []
    for request, window, state in zip(requests, windows, states, strict=True):
        k = _resolve_k(request, state.positive)
        location = locate(state, window, k) if k else None
        if k and location is None:
            return None
        cuts.append(_threshold(*location) if location else NOTHING)
    return cuts


def _threshold(key: int, quota: int, tied: int, per_grain: Array) -> SelectionThreshold:
    is_complete = quota == tied
    return SelectionThreshold(
        key, quota, tied, np.empty(0, np.int64) if is_complete else np.cumsum(per_grain) - per_grain
    )


def _select_by_digits(
    scores: ScoreFunction, requests: Sequence[SelectionRequest]
) -> Generator[Fold, Any, list[SelectionThreshold]]:
    (shift, width), *rest = DIGITS[scores.dtype]
    histogram = yield _count_first_digit(scores, shift, width)
    state = [_descend(histogram[request.stream], request.k or 0) for request in requests]
    for shift, width in rest:
        streams = np.array([request.stream for request in requests], np.int64)
        prefixes = np.array([key for key, _, _ in state], np.int64)
        histogram = yield _count_next_digit(scores, streams, prefixes, shift, width)
        state = [
            ((key << width) | digit, quota, tied)
            for (key, missing, _), row in zip(state, histogram, strict=True)
            for digit, quota, tied in [_descend(row, missing)]
        ]
    before = [np.empty(0, np.int64)] * len(state)
    partial = [n for n, (_, quota, tied) in enumerate(state) if quota < tied and requests[n].numbered]
    if partial:
        streams = np.array([requests[index].stream for index in partial], np.int64)
        keys = np.array([state[index][0] for index in partial], np.int64)
        per_grain = yield _count_ties(scores, streams, keys)
        for column, index in enumerate(partial):
            before[index] = np.cumsum(per_grain[:, column]) - per_grain[:, column]
    return [SelectionThreshold(*numbers, ties) for numbers, ties in zip(state, before, strict=True)]


def select_passes(dtype: Literal["float32", "float64"], numel: int, *, numbered: bool = True) -> int:
    """Return the number of fold passes of :func:`select` for given numbers ``k``.

    A large tensor, whose windows are guessed, takes one pass. Others take one pass per digit and one to number ties.
    """
    return 1 if numel >= LARGE else len(DIGITS[dtype]) + numbered


def selection_mask(cut: SelectionThreshold, keys: torch.Tensor, block: Block) -> torch.Tensor:
    """Return which scores of a block are among the k largest: ``[elements]`` of bool, from their :func:`bits`."""
    import torch

    if cut.quota == cut.tied:
        return keys >= cut.key
    equal = keys == cut.key
    grain = block.start // block.grain
    ties = block.grains(equal.long())
    offsets = torch.from_numpy(cut.before[grain : grain + len(ties)]).to(keys.device)
    rank = (ties.cumsum(-1) - 1 + offsets[:, None]).flatten()[: len(keys)]
    return (keys > cut.key) | (equal & ((rank * cut.stride) % cut.tied < cut.quota))


def value_of(cut: SelectionThreshold, dtype: str) -> float:
    """Return the k-th largest score itself."""
    integer_type = np.int32 if dtype == "float32" else np.int64
    return float(np.array(cut.key, integer_type).view(dtype))


def _count_positive(scores: ScoreFunction) -> Fold:
    def fused(block: StoredBlock) -> Any:
        assert scores.fused is not None
        return np.count_nonzero(scores.fused.scores(block), axis=1)

    return fold_counts(lambda block: (scores.of(block) > 0).sum(-1), fused if scores.fused else None)


def _count_first_digit(scores: ScoreFunction, shift: int, width: int) -> Fold:
    def of(block: Block) -> torch.Tensor:
        import torch

        digits = bits(scores.of(block)) >> shift
        return torch.stack([torch.bincount(row, minlength=1 << width) for row in digits])

    return fold_counts(of, scores.fused.first if scores.fused else None)


def _count_next_digit(scores: ScoreFunction, streams: Array, prefixes: Array, shift: int, width: int) -> Fold:
    def of(block: Block) -> torch.Tensor:
        import torch

        keys = bits(scores.of(block))
        rows = []
        for stream, prefix in zip(streams.tolist(), prefixes.tolist(), strict=True):
            row = keys[stream]
            inside = row[(row >> (shift + width)) == prefix]
            rows.append(torch.bincount((inside >> shift) & ((1 << width) - 1), minlength=1 << width))
        return torch.stack(rows)

    fused = scores.fused
    return fold_counts(of, (lambda block: fused.later(block, streams, prefixes, shift, width)) if fused else None)


def _count_ties(scores: ScoreFunction, streams: Array, tied_keys: Array) -> Fold:
    def of(block: Block) -> torch.Tensor:
        import torch

        keys = bits(scores.of(block))
        rows = [keys[stream] == key for stream, key in zip(streams.tolist(), tied_keys.tolist(), strict=True)]
        return block.grains(torch.stack(rows).long()).sum(-1).T

    fused = scores.fused
    return fold_grains(of, (lambda block: fused.ties(block, streams, tied_keys)) if fused else None)


def _descend(histogram: Array, k: int) -> tuple[int, int, int]:
    """Return the bin of the k-th largest, its rank inside the bin, and the size of the bin."""
    # Search groups of bins first: running sums over all bins would take longer than counting a small tensor.
    size = min(len(histogram), _GROUP)
    group, missing, _ = _from_top(histogram.reshape(-1, size).sum(1, dtype=np.int64), k)
    digit, rank, inside = _from_top(histogram[group * size : (group + 1) * size].astype(np.int64), missing)
    return group * size + digit, rank, inside


def _from_top(counts: Array, k: int) -> tuple[int, int, int]:
    running = np.cumsum(counts[::-1])
    position = int(np.searchsorted(running, k))
    index = len(counts) - 1 - position
    inside = int(counts[index])
    return index, k - int(running[position] - inside), inside

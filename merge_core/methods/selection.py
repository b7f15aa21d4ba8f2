"""Select exactly the k largest of many scores, without sorting or storing them.

In large tensors, :mod:`.windows` usually finds the k-th largest score in one pass. Otherwise the passes are a radix
select, because non-negative floats compare like their bit patterns. The first pass counts the leading 16 bits of every
score. The next pass counts the next bits of those scores whose leading bits equal those of the k-th largest, and so on
until all of its bits are known (two passes in float32, four in float64).

Scores that equal the k-th largest are ties. Differences of bfloat16 weights have so many ties that only some of them
may be selected, and these should be spread evenly over the tensor. Therefore ties are numbered in element order, and a
tie is selected if a golden-ratio stride maps its number below the quota. The selection does not depend on the block
size, and a smaller k selects a subset.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mergegate.merge_core.methods.contract import Array, Block, Fold, fold_counts, fold_grains
from mergegate.merge_core.methods.scores import DIGITS, ScoreFunction, SelectionRequest, score_bits
from mergegate.merge_core.methods.windows import LARGE, count_in_windows, find_kth_largest, guess_windows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SelectionThreshold:
    """Answer to a :class:`.SelectionRequest`: the k-th largest score, and how many of its ties are selected.

    Args:
        key: Bit pattern of the k-th largest score. All larger scores are selected.
        quota: Number of ties that are selected.
        tied: Number of ties, that is, of scores that equal the k-th largest.
        before: Number of ties before each grain. Empty if all ties are selected.
    """

    key: int
    quota: int
    tied: int
    before: Array

    @property
    def stride(self) -> int:
        """Number near ``0.618 * tied`` and coprime to it, so that ``rank * stride % tied`` permutes all ranks."""
        step = max(1, round(self.tied * 0.6180339887498949))
        while math.gcd(step, self.tied) != 1:
            step += 1
        return step


NOTHING = SelectionThreshold(2**31, 0, 0, np.empty(0, np.int64))


def select(
    scores: ScoreFunction, requests: Sequence[SelectionRequest], numel: int
) -> Generator[Fold, Any, list[SelectionThreshold]]:
    """Yield fold passes over ``numel`` scores, and return one threshold per request. Use it with ``yield from``.

    The threshold is :data:`NOTHING` if a request for a share of the positive scores rounds down to zero scores.
    """
    if numel >= LARGE:
        # Select with windows, unless a k-th largest score is outside its window.
        windows = yield from guess_windows(scores, requests, numel)
        states = (yield from count_in_windows(scores, windows)) if windows else []
        window_thresholds: list[SelectionThreshold] = []
        for request, window, state in zip(requests, windows, states, strict=True) if states else ():
            if not (k := request.resolve_k(state.positive)):
                window_thresholds.append(NOTHING)
                continue
            if (location := find_kth_largest(state, window, k)) is None:
                break
            key, quota, tied, per_grain = location
            before = np.empty(0, np.int64) if quota == tied else np.cumsum(per_grain) - per_grain
            window_thresholds.append(SelectionThreshold(key, quota, tied, before))
        if len(window_thresholds) == len(requests):
            return window_thresholds
    stored = scores.stored
    if any(request.k is None for request in requests):
        positive = yield fold_counts(
            lambda block: (scores.score_block(block) > 0).sum(-1),
            (lambda block: np.asarray(np.count_nonzero(stored.scores(block), axis=1))) if stored else None,
        )
        requests = [replace(request, k=request.resolve_k(positive[request.stream])) for request in requests]
    positive_requests = [request for request in requests if request.k]
    thresholds = iter((yield from _select_by_digits(scores, positive_requests)) if positive_requests else [])
    return [next(thresholds) if request.k else NOTHING for request in requests]


def _select_by_digits(
    scores: ScoreFunction, requests: Sequence[SelectionRequest]
) -> Generator[Fold, Any, list[SelectionThreshold]]:
    """Select with one pass per digit, and a last pass that counts ties if a request needs their numbers."""
    stored = scores.stored
    (shift, width), *next_digits = DIGITS[scores.dtype]

    def reduce_block(block: Block) -> torch.Tensor:
        import torch

        digits = score_bits(scores.score_block(block)) >> shift
        return torch.stack([torch.bincount(row, minlength=1 << width) for row in digits])

    histogram = yield fold_counts(reduce_block, stored.count_first_digits if stored else None)
    state = [_find_bin(histogram[request.stream], request.k or 0) for request in requests]
    for digit in next_digits:
        prefixes = [(request.stream, key) for request, (key, _, _) in zip(requests, state, strict=True)]
        histogram = yield _count_next_digits(scores, prefixes, *digit)
        state = [
            ((key << digit[1]) | bin_index, quota, tied)
            for (key, missing, _), row in zip(state, histogram, strict=True)
            for bin_index, quota, tied in [_find_bin(row, missing)]
        ]
    before = [np.empty(0, np.int64)] * len(state)
    partial = [n for n, (_, quota, tied) in enumerate(state) if quota < tied and requests[n].numbered]
    if partial:
        streams = np.array([requests[index].stream for index in partial], np.int64)
        keys = np.array([state[index][0] for index in partial], np.int64)

        def reduce_ties(block: Block) -> torch.Tensor:
            import torch

            bits = score_bits(scores.score_block(block))
            rows = [bits[stream] == key for stream, key in zip(streams.tolist(), keys.tolist(), strict=True)]
            return block.grains(torch.stack(rows).long()).sum(-1).T

        per_grain = yield fold_grains(
            reduce_ties, (lambda block: stored.count_ties(block, streams, keys)) if stored else None
        )
        for column, index in enumerate(partial):
            before[index] = np.cumsum(per_grain[:, column]) - per_grain[:, column]
    return [SelectionThreshold(*numbers, ties) for numbers, ties in zip(state, before, strict=True)]


def _count_next_digits(scores: ScoreFunction, prefixes: Sequence[tuple[int, int]], shift: int, width: int) -> Fold:
    """Return the pass that counts the next digit of the scores with each prefix, given as (stream, prefix)."""

    def reduce_block(block: Block) -> torch.Tensor:
        import torch

        keys = score_bits(scores.score_block(block))
        rows = []
        for stream, prefix in prefixes:
            row = keys[stream]
            inside = row[(row >> (shift + width)) == prefix]
            rows.append(torch.bincount((inside >> shift) & ((1 << width) - 1), minlength=1 << width))
        return torch.stack(rows)

    stored, (streams, keys) = scores.stored, np.array(prefixes, np.int64).T
    arguments = (np.ascontiguousarray(streams), np.ascontiguousarray(keys), shift, width)
    return fold_counts(reduce_block, (lambda block: stored.count_next_digits(block, *arguments)) if stored else None)


def select_passes(dtype: Literal["float32", "float64"], numel: int, *, numbered: bool = True) -> int:
    """Return the expected number of fold passes of :func:`select` for requests with a fixed ``k``.

    Large tensors take one pass, others one per digit and another one if ties are numbered.
    """
    return 1 if numel >= LARGE else len(DIGITS[dtype]) + numbered


def selection_mask(threshold: SelectionThreshold, keys: torch.Tensor, block: Block) -> torch.Tensor:
    """Return which elements of a block are selected, as bool ``[elements]``. ``keys`` are from :func:`.score_bits`."""
    import torch

    if threshold.quota == threshold.tied:
        return keys >= threshold.key
    equal = keys == threshold.key
    grain = block.start // block.grain
    ties = block.grains(equal.long())
    offsets = torch.from_numpy(threshold.before[grain : grain + len(ties)]).to(keys.device)
    rank = (ties.cumsum(-1) - 1 + offsets[:, None]).flatten()[: len(keys)]
    return (keys > threshold.key) | (equal & ((rank * threshold.stride) % threshold.tied < threshold.quota))


def _find_bin(histogram: Array, k: int) -> tuple[int, int, int]:
    """Return the bin of the k-th largest score, the rank of the score in this bin, and the size of the bin."""

    def search_from_top(counts: Array, k: int) -> tuple[int, int, int]:
        running = np.cumsum(counts[::-1])
        position = int(np.searchsorted(running, k))
        index = len(counts) - 1 - position
        inside = int(counts[index])
        return index, k - int(running[position] - inside), inside

    # Search groups of bins first: running sums over all bins would take longer than counting a small tensor.
    size = min(len(histogram), 256)
    group, missing, _ = search_from_top(histogram.reshape(-1, size).sum(1, dtype=np.int64), k)
    digit, rank, inside = search_from_top(histogram[group * size : (group + 1) * size].astype(np.int64), missing)
    return group * size + digit, rank, inside

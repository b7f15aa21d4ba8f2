"""Select exactly the k largest of many scores, without sorting or storing them.

In a large tensor, a small sample shows a *window*, that is, two scores between which the k-th largest probably is. One
pass then counts the scores above the window and stores those inside, usually one percent or less, among which the k-th
largest is found exactly. Scores that many elements share, such as differences of bfloat16 weights, are not stored but
counted in each grain.

If the tensor is small, the k-th largest is outside the window, or too many scores are inside, the passes are a radix
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
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mergegate.merge_core.methods.contract import (
    GRAIN,
    Array,
    Block,
    Fold,
    StoredBlock,
    fold_counts,
    fold_grains,
    load_kernels,
    torch,
)

# Digits of a non-negative float without its sign bit, from the most significant: (shift, width).
DIGITS = {"float32": ((15, 16), (0, 15)), "float64": ((47, 16), (31, 16), (15, 16), (0, 15))}
# Number of elements from which windows are used. Smaller tensors are read quickly, so their digits are counted.
LARGE = 4 << 20
# One in ``_SAMPLE_EVERY`` grains is sampled, but at least and at most these numbers of pieces.
_SAMPLE_EVERY, _MIN_PIECES, _MAX_PIECES = 64, 8, 256
# Half the width of a window, in standard deviations of the sampled position of the k-th largest.
_DEVIATIONS = 6.0
# Maximum number of keys per window that are counted instead of stored, and the minimum share of the scores inside the
# window that such a key must have.
_COMMON, _COMMON_PART = 8, 1 / 64
_NO_KEY = 2**32 - 1
# Maximum number of stored scores per tensor, and their maximum share of all scores.
_MAX_STORED, _MAX_STORED_SHARE = 16 << 20, 1 / 16
# Number of scores to compute at a time, so that they are still in the cache when they are scanned.
_PART = 1 << 15


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
class ScoreFunction:
    """Function that assigns one or more non-negative scores (streams) to each element of a tensor.

    Args:
        score_block: Function that returns the scores of a block: ``[streams, elements]``.
        dtype: Data type of the scores.
        score_stored: Fused counterpart, which returns float32.
        are_magnitudes: Whether the scores are ``|x_i - b|``. Kernels count these without storing them.
    """

    score_block: Callable[[Block], torch.Tensor]
    dtype: Literal["float32", "float64"]
    score_stored: Callable[[StoredBlock], Array]
    are_magnitudes: bool = False

    def count_first_digits(self, block: StoredBlock) -> Any:
        """Return how often each value of the leading digits occurs: ``[streams, bins]``."""
        if self.are_magnitudes:
            return block.run("first_digits")
        shift, width = DIGITS["float32"][0]
        return load_kernels().first_digit_of(self.score_stored(block), shift, 1 << width)

    def count_next_digits(self, block: StoredBlock, streams: Array, prefixes: Array, shift: int, width: int) -> Any:
        """Return how often each value of the next digits occurs after each prefix: ``[requests, bins]``."""
        arguments = (streams, prefixes, shift, width)
        if self.are_magnitudes:
            return block.run("next_digits", *arguments)
        return load_kernels().next_digit_of(self.score_stored(block), *arguments)

    def count_ties(self, block: StoredBlock, streams: Array, keys: Array) -> Any:
        """Return how many scores in each grain equal each key: ``[grains, requests]``."""
        if self.are_magnitudes:
            return block.run("ties", block.grain, streams, keys)
        return load_kernels().ties_of(self.score_stored(block), block.grain, streams, keys)


def score_bits(scores: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns of non-negative scores as int64. They have the order of the scores; NaN is largest."""
    integer_type = torch.int32 if scores.dtype == torch.float32 else torch.int64
    # Adding 0 turns -0.0, whose pattern is negative, into 0.0.
    return (scores + 0.0).contiguous().view(integer_type).long()


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
    if any(request.k is None for request in requests):
        positive = yield fold_counts(
            lambda block: (scores.score_block(block) > 0).sum(-1),
            lambda block: np.asarray(np.count_nonzero(scores.score_stored(block), axis=1)),
        )
        requests = [replace(request, k=request.resolve_k(positive[request.stream])) for request in requests]
    positive_requests = [request for request in requests if request.k]
    thresholds = iter((yield from _select_by_digits(scores, positive_requests)) if positive_requests else [])
    return [next(thresholds) if request.k else NOTHING for request in requests]


def _select_by_digits(
    scores: ScoreFunction, requests: Sequence[SelectionRequest]
) -> Generator[Fold, Any, list[SelectionThreshold]]:
    """Select with one pass per digit, and a last pass that counts ties if a request needs their numbers."""
    (shift, width), *next_digits = DIGITS[scores.dtype]

    def reduce_block(block: Block) -> torch.Tensor:
        digits = score_bits(scores.score_block(block)) >> shift
        return torch.stack([torch.bincount(row, minlength=1 << width) for row in digits])

    histogram = yield fold_counts(reduce_block, scores.count_first_digits)
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
            bits = score_bits(scores.score_block(block))
            rows = [bits[stream] == key for stream, key in zip(streams.tolist(), keys.tolist(), strict=True)]
            return block.grains(torch.stack(rows).long()).sum(-1).T

        per_grain = yield fold_grains(reduce_ties, lambda block: scores.count_ties(block, streams, keys))
        for column, index in enumerate(partial):
            before[index] = np.cumsum(per_grain[:, column]) - per_grain[:, column]
    return [SelectionThreshold(*numbers, ties) for numbers, ties in zip(state, before, strict=True)]


def _count_next_digits(scores: ScoreFunction, prefixes: Sequence[tuple[int, int]], shift: int, width: int) -> Fold:
    """Return the pass that counts the next digit of the scores with each prefix, given as (stream, prefix)."""

    def reduce_block(block: Block) -> torch.Tensor:
        keys = score_bits(scores.score_block(block))
        rows = []
        for stream, prefix in prefixes:
            row = keys[stream]
            inside = row[(row >> (shift + width)) == prefix]
            rows.append(torch.bincount((inside >> shift) & ((1 << width) - 1), minlength=1 << width))
        return torch.stack(rows)

    streams, keys = (np.ascontiguousarray(column) for column in np.array(prefixes, np.int64).T)
    return fold_counts(reduce_block, lambda block: scores.count_next_digits(block, streams, keys, shift, width))


def select_passes(dtype: Literal["float32", "float64"], numel: int, *, numbered: bool = True) -> int:
    """Return the expected number of fold passes of :func:`select` for requests with a fixed ``k``.

    Large tensors take one pass, others one per digit and another one if ties are numbered.
    """
    return 1 if numel >= LARGE else len(DIGITS[dtype]) + numbered


def selection_mask(threshold: SelectionThreshold, keys: torch.Tensor, block: Block) -> torch.Tensor:
    """Return which elements of a block are selected, as bool ``[elements]``. ``keys`` are from :func:`.score_bits`."""
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


@dataclass(frozen=True)
class Window:
    """Range of scores in which the k-th largest is searched. A key is the bit pattern of a score.

    Args:
        stream: Index of the stream of scores.
        low: Smallest key in the window.
        high: Smallest key above the window.
        common: Keys inside the window that many elements share.
    """

    stream: int
    low: int
    high: int
    common: tuple[int, ...]


@dataclass(frozen=True)
class WindowState:
    """Scores that one pass found inside and above a window.

    Args:
        above: Number of scores above the window.
        positive: Number of positive scores in the stream.
        common: Number of scores with each common key: ``[grains, common keys]``.
        unshared_keys: Keys of the other scores inside the window, in the order of their elements.
        per_grain: Number of these keys: ``[grains]``.
    """

    above: int
    positive: int
    common: Array
    unshared_keys: Array
    per_grain: Array


def guess_windows(
    scores: ScoreFunction, requests: Sequence[SelectionRequest], numel: int
) -> Generator[Fold, Any, list[Window]]:
    """Sample the tensor, and return one window for each request, or an empty list if too many scores are inside."""

    def combine(parts: Sequence[Array]) -> Any:
        guesses: dict[SelectionRequest, tuple[Window, float]] = {}
        for stream in {request.stream for request in requests}:
            pieces = np.stack([part[stream] for part in parts])
            ordered = np.sort(pieces, axis=None)
            for request in requests:
                if request.stream == stream:
                    guesses[request] = _guess_window(request, pieces, ordered, numel, scores.dtype)
            del pieces, ordered  # Free the memory before the next stream is sorted.
        shares = [guesses[request][1] for request in requests]
        is_small = sum(shares) * numel <= _MAX_STORED and max(shares) <= _MAX_STORED_SHARE
        return [guesses[request][0] for request in requests] if is_small else []

    windows: list[Window] = yield Fold(
        lambda block: score_bits(scores.score_block(block)),
        combine,
        lambda block: scores.score_stored(block).view(np.int32) & np.int32(0x7FFFFFFF),
        sample_count=max(_MIN_PIECES, min(_MAX_PIECES, numel // GRAIN // _SAMPLE_EVERY)),
    )
    return windows


def _guess_window(
    request: SelectionRequest, pieces: Array, ordered_scores: Array, numel: int, dtype: str
) -> tuple[Window, float]:
    """Return the window for a request, and the share of all ``numel`` scores that it would store.

    ``pieces`` are the sampled scores ``[pieces, elements]``, and ``ordered_scores`` the same in ascending order.
    """
    size = len(ordered_scores)
    positive = (pieces > 0).mean(1)
    share = request.of_positive * positive.mean() if request.k is None else request.k / numel
    index = size - min(max(round(share * size), 1), size)
    expected = request.of_positive * positive if request.k is None else share
    # Count the scores that equal the guess once as above it and once as not above it, and use the larger deviation.
    spread = max(
        np.std((pieces >= ordered_scores[index]).mean(1) - expected),
        np.std((pieces > ordered_scores[index]).mean(1) - expected),
    )
    margin = int(_DEVIATIONS * spread / np.sqrt(len(pieces)) * size + np.sqrt(size)) + 1
    top = 2**31 - 1 if dtype == "float32" else 2**63 - 1
    low = int(ordered_scores[index - margin]) if index >= margin else 0
    high = int(ordered_scores[index + margin]) + 1 if index + margin < size else top
    # Search with the type of the array, because NumPy would copy the array for a wider type. Only NaN is above ``top``.
    begin, end = ordered_scores.searchsorted(np.array([low, min(high, top)], ordered_scores.dtype))
    keys, counts = np.unique(ordered_scores[begin:end], return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_COMMON]
    common = most[counts[most] >= (end - begin) * _COMMON_PART]
    stored_share = (end - begin - counts[common].sum()) / size
    return Window(request.stream, low, high, tuple(keys[common].tolist())), float(stored_share)


def count_in_windows(scores: ScoreFunction, windows: Sequence[Window]) -> Generator[Fold, Any, list[WindowState]]:
    """Yield the pass that scans the windows. Return one state per window, or an empty list if too many are inside."""
    common_keys = max(len(window.common) for window in windows)
    header = 3 * len(windows) + 1

    def reduce_block(block: Block) -> torch.Tensor:
        keys = score_bits(scores.score_block(block))
        numbers, counts, others = [0], [], []
        for window in windows:
            row = keys[window.stream]
            inside = (row >= window.low) & (row < window.high)
            columns = []
            for key in window.common:
                columns.append(row == key)
                inside &= row != key
            columns += [torch.zeros_like(inside)] * (common_keys - len(window.common)) + [inside]
            counts.append(block.grains(torch.stack(columns).long()).sum(-1).T)
            others.append(row[inside])
            numbers += [int((row >= window.high).sum()), int((row > 0).sum()), len(others[-1])]
        header_numbers = torch.tensor(numbers, dtype=torch.int64, device=keys.device)
        return torch.cat((header_numbers, torch.stack(counts, 1).flatten(), *others))

    def reduce_stored(block: StoredBlock) -> Any:
        grains, requests = -(-block.length // block.grain), len(windows)
        table = np.array([(window.stream, window.low, window.high) for window in windows], np.int64)
        common = np.full((requests, common_keys), _NO_KEY, np.uint32)
        for row, window in zip(common, windows, strict=True):
            row[: len(window.common)] = window.common
        above, filled = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
        counts = np.zeros((grains, requests, common_keys + 1), np.int32)
        keys = np.empty((requests, block.length // 8 + _PART), np.uint32)
        positive: Any = None
        step = max(1, _PART // block.grain) * block.grain
        for begin in range(0, block.length, step):
            length = min(step, block.length - begin)
            part = StoredBlock(block.data, block.rows + begin, length, block.start + begin, block.grain)
            part_scores = scores.score_stored(part)
            positive = np.zeros(len(part_scores), np.int64) if positive is None else positive
            part_counts = counts[begin // block.grain :]
            load_kernels().scan_windows(
                part_scores, table, common, block.grain, above, positive, part_counts, keys, filled
            )
        is_complete = bool((filled <= keys.shape[1]).all())
        numbers = np.stack((above, positive[table[:, 0]], filled if is_complete else 0 * filled), 1)
        others = [row[:number] for row, number in zip(keys, filled, strict=True)] if is_complete else []
        parts = (np.array([not is_complete]), numbers.ravel(), counts.ravel(), *(row.view(np.int32) for row in others))
        return np.concatenate([np.asarray(part, np.int32) for part in parts])

    def combine(parts: Sequence[Array]) -> Any:
        if any(part[0] for part in parts):
            return []
        numbers = np.stack([part[1:header] for part in parts]).astype(np.int64).reshape(len(parts), -1, 3)
        tables, stored_keys = [], [list[Any]() for _ in windows]
        for part, stored_counts in zip(parts, numbers[:, :, 2], strict=True):
            others = len(part) - int(stored_counts.sum())
            tables.append(part[header:others].reshape(-1, len(windows), common_keys + 1))
            for row, keys in zip(stored_keys, np.split(part[others:], np.cumsum(stored_counts)[:-1]), strict=True):
                row.append(keys)
        counts, totals = np.concatenate(tables), numbers.sum(0)
        return [
            WindowState(
                int(totals[r, 0]),
                int(totals[r, 1]),
                counts[:, r, : len(window.common)],
                np.concatenate(stored_keys[r]),
                counts[:, r, common_keys],
            )
            for r, window in enumerate(windows)
        ]

    states: list[WindowState] = yield Fold(reduce_block, combine, reduce_stored)
    return states


def find_kth_largest(state: WindowState, window: Window, k: int) -> tuple[int, int, int, Array] | None:
    """Find the k-th largest score, or return None if it is outside the window.

    Return its key, the number of scores with this key that are among the k largest, the number of all scores with this
    key, and the number of those in each grain.
    """
    common = state.common.sum(0, dtype=np.int64)
    other_keys, other_counts = np.unique(state.unshared_keys, return_counts=True)
    keys = np.concatenate((np.array(window.common, np.int64), other_keys))
    order = np.argsort(-keys)
    counts = np.concatenate((common, other_counts))[order]
    running, missing = np.cumsum(counts), k - state.above
    if missing <= 0 or len(running) == 0 or missing > running[-1]:
        return None
    index = int(np.searchsorted(running, missing))
    key, tied = int(keys[order[index]]), int(counts[index])
    if key in window.common:
        per_grain = state.common[:, window.common.index(key)].astype(np.int64)
    else:
        ends = np.cumsum(state.per_grain, dtype=np.int64)
        grains = np.searchsorted(ends, np.flatnonzero(state.unshared_keys == key), side="right")
        per_grain = np.bincount(grains, minlength=len(ends))
    return key, missing - int(running[index] - tied), tied, per_grain

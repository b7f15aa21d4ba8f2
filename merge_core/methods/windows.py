"""Find the k largest of many scores in one pass over a large tensor, with the help of a small sample.

The sample shows a window, that is, two scores between which the k-th largest probably is. One pass then counts the
scores above the window and stores those inside, usually one percent or less, among which the k-th largest is found
exactly. Scores that many elements share, such as differences of bfloat16 weights, are not stored but counted in each
grain, as their numbering requires (see :mod:`.selection`).

If the k-th largest is outside the window, or too many scores are inside, :func:`.selection.select` counts digits
instead, in three passes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.methods.contract import GRAIN, Array, Block, Fold, StoredBlock, load_kernels
from mergegate.merge_core.methods.scores import ScoreFunction, SelectionRequest, score_bits

if TYPE_CHECKING:
    import torch

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

    stored = scores.stored
    windows: list[Window] = yield Fold(
        lambda block: score_bits(scores.score_block(block)),
        combine,
        (lambda block: stored.scores(block).view(np.int32) & np.int32(0x7FFFFFFF)) if stored else None,
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
        import torch

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
        assert scores.stored is not None
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
            part_scores = scores.stored.scores(part)
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

    states: list[WindowState] = yield Fold(reduce_block, combine, reduce_stored if scores.stored else None)
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

"""The k largest of many scores in one pass over a large tensor, where a few of its parts tell about where to look.

A glance at evenly spread grains says between which two scores the k-th largest will be: a window that has a percent of
all scores, or less. One pass then counts the scores above the window and keeps those inside; the k-th largest is found
among these, exactly. Scores that many elements share, as differences of bfloat16 weights do, are only counted, grain by
grain, which is also what numbers them (see :mod:`.selection`).

The window is nothing but a guess: where the k-th largest is outside, or too much is inside, nothing is found, and
:func:`.selection.select` counts digits instead, in three passes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.methods.contract import GRAIN, Block, Fold, StoredBlock

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.methods.contract import Array
    from mergegate.merge_core.methods.selection import ScoreFunction, SelectionRequest

# Smaller tensors are read in a moment: they are counted digit by digit.
LARGE = 4 << 20
# A part of so many is glanced at, in so many pieces.
_GLANCED_PART, _FEWEST_PIECES, _MOST_PIECES = 64, 8, 256
# Half the width of a window, in standard deviations of where a glance sees the k-th largest.
_DEVIATIONS = 6.0
# Keys of a window that are only counted; a key is one if it is so large a part of those inside.
_COMMON, _COMMON_PART = 8, 1 / 64
_NO_KEY = 2**32 - 1
# Most scores that are kept: of one tensor, and as a part of it.
_MOST_KEPT, _MOST_KEPT_PART = 16 << 20, 1 / 16
# Scores that are computed at once, so that they are still in the cache when they are looked at.
_PART = 1 << 15


@dataclass(frozen=True)
class Window:
    """Where the answer to a request is looked for.

    Args:
        stream: Of the scores.
        low, high: Keys from ``low`` on, below ``high``.
        common: Keys inside that many elements have.
    """

    stream: int
    low: int
    high: int
    common: tuple[int, ...]


@dataclass(frozen=True)
class WindowState:
    """What one pass has seen of one window.

    Args:
        above: How many scores are above it.
        positive: How many of the whole stream are not zero.
        common: ``[grains, common keys]``: how many of each.
        others: Keys of the others inside, in the order of their elements.
        per_grain: ``[grains]``: how many of them.
    """

    above: int
    positive: int
    common: Array
    others: Array
    per_grain: Array


def glance(
    scores: ScoreFunction, requests: Sequence[SelectionRequest], numel: int
) -> Generator[Fold, Any, list[Window]]:
    """A window for each request; none at all when they would hold too much."""
    pieces = max(_FEWEST_PIECES, min(_MOST_PIECES, numel // GRAIN // _GLANCED_PART))

    def of(block: Block) -> torch.Tensor:
        from mergegate.merge_core.methods.selection import bits

        return bits(scores.of(block))

    def fused(block: StoredBlock) -> Any:
        assert scores.fused is not None
        return scores.fused.scores(block).view(np.int32) & np.int32(0x7FFFFFFF)

    def combine(parts: Sequence[Array]) -> Any:
        guesses: dict[SelectionRequest, tuple[Window, float]] = {}
        for stream in {request.stream for request in requests}:
            asked = [request for request in requests if request.stream == stream]
            guesses |= _windows(asked, np.stack([part[stream] for part in parts]), numel, scores.dtype)
        kept = [guesses[request][1] for request in requests]
        few = sum(kept) * numel <= _MOST_KEPT and max(kept) <= _MOST_KEPT_PART
        return [guesses[request][0] for request in requests] if few else []

    windows: list[Window] = yield Fold(of, combine, fused if scores.fused else None, glance=pieces)
    return windows


def _windows(
    requests: Sequence[SelectionRequest], pieces: Array, numel: int, dtype: str
) -> dict[SelectionRequest, tuple[Window, float]]:
    """:func:`_window` of all requests of one stream; what is seen of it is sorted once, and one stream at a time."""
    ordered = np.sort(pieces, axis=None)
    return {request: _window(request, pieces, ordered, numel, dtype) for request in requests}


def _window(request: SelectionRequest, pieces: Array, ordered: Array, numel: int, dtype: str) -> tuple[Window, float]:
    """Window of one request, and the part of all scores that it would keep.

    Args:
        request: For the k largest.
        pieces: ``[pieces, elements]``: what was seen.
        ordered: All of it, from the smallest.
        numel: Number of all scores.
        dtype: Theirs.
    """
    size = len(ordered)
    positive = (pieces > 0).mean(1)
    share = request.of_positive * positive.mean() if request.k is None else request.k / numel
    place = size - min(max(round(share * size), 1), size)
    expected = request.of_positive * positive if request.k is None else share
    # Of equal scores at the place all, or none, are above: the pieces may differ in either.
    spread = max(
        np.std((pieces >= ordered[place]).mean(1) - expected), np.std((pieces > ordered[place]).mean(1) - expected)
    )
    margin = int(_DEVIATIONS * spread / np.sqrt(len(pieces)) * size + np.sqrt(size)) + 1
    top = 2**31 - 1 if dtype == "float32" else 2**63 - 1
    low = int(ordered[place - margin]) if place >= margin else 0
    high = int(ordered[place + margin]) + 1 if place + margin < size else top
    # In the type of what is searched, which is copied into a wider one otherwise. (Only a NaN is beyond the top.)
    begin, end = ordered.searchsorted(np.array([low, min(high, top)], ordered.dtype))
    keys, counts = np.unique(ordered[begin:end], return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_COMMON]
    common = most[counts[most] >= (end - begin) * _COMMON_PART]
    kept = (end - begin - counts[common].sum()) / size
    return Window(request.stream, low, high, tuple(keys[common].tolist())), float(kept)


def look(scores: ScoreFunction, windows: Sequence[Window]) -> Generator[Fold, Any, list[WindowState]]:
    """What is in the windows; nothing at all when it is more than a glance had seen."""
    several = max(len(window.common) for window in windows)
    header = 3 * len(windows) + 1

    def of(block: Block) -> torch.Tensor:
        import torch

        from mergegate.merge_core.methods.selection import bits

        keys = bits(scores.of(block))
        numbers, counts, others = [0], [], []
        for window in windows:
            row = keys[window.stream]
            left = (row >= window.low) & (row < window.high)
            columns = []
            for key in window.common:
                columns.append(row == key)
                left &= row != key
            columns += [torch.zeros_like(left)] * (several - len(window.common)) + [left]
            counts.append(block.grains(torch.stack(columns).long()).sum(-1).T)
            others.append(row[left])
            numbers += [int((row >= window.high).sum()), int((row > 0).sum()), len(others[-1])]
        first = torch.tensor(numbers, dtype=torch.int64, device=keys.device)
        return torch.cat((first, torch.stack(counts, 1).flatten(), *others))

    def fused(block: StoredBlock) -> Any:
        from mergegate.merge_core.methods import kernels

        assert scores.fused is not None
        grains, requests = -(-block.length // block.grain), len(windows)
        table = np.array([(window.stream, window.low, window.high) for window in windows], np.int64)
        common = np.full((requests, several), _NO_KEY, np.uint32)
        for row, window in zip(common, windows, strict=True):
            row[: len(window.common)] = window.common
        above, filled = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
        counts = np.zeros((grains, requests, several + 1), np.int32)
        keys = np.empty((requests, block.length // 8 + _PART), np.uint32)
        positive: Any = None
        step = max(1, _PART // block.grain) * block.grain
        for first in range(0, block.length, step):
            length = min(step, block.length - first)
            part = StoredBlock(block.data, block.rows + first, length, block.start + first, block.grain)
            computed = scores.fused.scores(part)
            positive = np.zeros(len(computed), np.int64) if positive is None else positive
            here = counts[first // block.grain :]
            kernels.scan_windows(computed, table, common, block.grain, above, positive, here, keys, filled)
        fitting = bool((filled <= keys.shape[1]).all())
        numbers = np.stack((above, positive[table[:, 0]], filled if fitting else 0 * filled), 1)
        others = [row[:number] for row, number in zip(keys, filled, strict=True)] if fitting else []
        parts = (np.array([not fitting]), numbers.ravel(), counts.ravel(), *(row.view(np.int32) for row in others))
        return np.concatenate([np.asarray(part, np.int32) for part in parts])

    def combine(parts: Sequence[Array]) -> Any:
        if any(part[0] for part in parts):
            return []
        numbers = np.stack([part[1:header] for part in parts]).astype(np.int64).reshape(len(parts), -1, 3)
        tables, kept = [], [list[Any]() for _ in windows]
        for part, seen in zip(parts, numbers[:, :, 2], strict=True):
            others = len(part) - int(seen.sum())
            tables.append(part[header:others].reshape(-1, len(windows), several + 1))
            for row, keys in zip(kept, np.split(part[others:], np.cumsum(seen)[:-1]), strict=True):
                row.append(keys)
        counts, totals = np.concatenate(tables), numbers.sum(0)
        return [
            WindowState(
                int(totals[r, 0]),
                int(totals[r, 1]),
                counts[:, r, : len(window.common)],
                np.concatenate(kept[r]),
                counts[:, r, several],
            )
            for r, window in enumerate(windows)
        ]

    found: list[WindowState] = yield Fold(of, combine, fused if scores.fused else None)
    return found


def placed(found: WindowState, window: Window, k: int) -> tuple[int, int, int, Array] | None:
    """Key of the k-th largest, its rank among its equals, how many those are, and how many in each grain.

    None when it is not in the window.
    """
    common = found.common.sum(0, dtype=np.int64)
    others, of_others = np.unique(found.others, return_counts=True)
    keys = np.concatenate((np.array(window.common, np.int64), others))
    order = np.argsort(-keys)
    counts = np.concatenate((common, of_others))[order]
    running, missing = np.cumsum(counts), k - found.above
    if missing <= 0 or len(running) == 0 or missing > running[-1]:
        return None
    at = int(np.searchsorted(running, missing))
    key, tied = int(keys[order[at]]), int(counts[at])
    if key in window.common:
        per_grain = found.common[:, window.common.index(key)].astype(np.int64)
    else:
        ends = np.cumsum(found.per_grain, dtype=np.int64)
        grains = np.searchsorted(ends, np.flatnonzero(found.others == key), side="right")
        per_grain = np.bincount(grains, minlength=len(ends))
    return key, missing - int(running[at] - tied), tied, per_grain

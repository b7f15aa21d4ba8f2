"""The k largest of many scores, exactly, without sorting and without holding them: a radix select over blocks.

Of large tensors one pass is enough, where :mod:`.windows` guesses well. Else digits are counted: non-negative floats
compare like their bit patterns. One pass counts the leading 16 bits of every score; the bin in which the k-th largest
falls is then counted by its next bits in another pass, until the k-th largest score itself is known (two passes in
float32, four in float64).

Among scores equal to the k-th largest only some may be taken so that exactly k remain; differences of bfloat16
weights are tied in masses, so taking all of them, or the first ones, would be neither k nor even over the tensor. They
are numbered in element order and every number that a golden-ratio stride maps below the wanted count is taken: exact,
spread evenly, independent of blocks, and nested (a smaller k takes a subset).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mergegate.merge_core.methods.contract import Block, Fold, StoredBlock, fold_counts, fold_grains
from mergegate.merge_core.methods.windows import LARGE, glance, look, placed

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.methods.contract import Array

# Bits of a non-negative float below its sign, taken in digits from the most significant: (shift, width).
DIGITS = {
    "float32": ((15, 16), (0, 15)),
    "float64": ((47, 16), (31, 16), (15, 16), (0, 15)),
}


@dataclass(frozen=True)
class SelectionRequest:
    """The ``k`` largest scores of stream ``stream``.

    Args:
        stream: Number of the stream.
        k: From 1 to the number of scores; None: so many that they are the part ``of_positive`` of those above zero.
        of_positive: See ``k``; rounded down.
        numbered: Whether equal scores need numbers. Without, only the k-th largest score itself is asked for.
    """

    stream: int
    k: int | None
    of_positive: float = 0.0
    numbered: bool = True


@dataclass(frozen=True)
class SelectionThreshold:
    """The answer to a request.

    Args:
        key: Bit pattern of the k-th largest score; everything above it is taken.
        wanted: How many of the scores equal to it are taken.
        tied: How many there are.
        before: Number of equal scores before each grain; empty when all of them are taken.
    """

    key: int
    wanted: int
    tied: int
    before: Array

    @property
    def stride(self) -> int:
        """A step coprime to ``tied`` and near its golden section: ``rank * stride % tied`` visits every number once."""
        step = max(1, round(self.tied * 0.6180339887498949))
        while math.gcd(step, self.tied) != 1:
            step += 1
        return step


_GROUP = 256  # bins


NOTHING = SelectionThreshold(2**31, 0, 0, np.empty(0, np.int64))


@dataclass(frozen=True)
class Counters:
    """Fused counterparts of the passes: counts from stored blocks.

    Args:
        scores: Float32 ``[streams, elements]``.
        first: Leading digit → ``[streams, bins]``.
        later: (block, streams, prefixes, shift, width): next digit → ``[requests, bins]``.
        ties: (block, streams, keys): equal scores → ``[grains, requests]``.
    """

    scores: Callable[[StoredBlock], Array]
    first: Callable[[StoredBlock], Array]
    later: Callable[[StoredBlock, Array, Array, int, int], Array]
    ties: Callable[[StoredBlock, Array, Array], Array]


@dataclass(frozen=True)
class ScoreFunction:
    """Where scores come from: ``[streams, elements]``, non-negative, float32 or float64; how to count them fused."""

    of: Callable[[Block], torch.Tensor]
    dtype: Literal["float32", "float64"]
    fused: Counters | None = None


def counters(scores: Callable[[StoredBlock], Array]) -> Counters:
    """Counters for ``scores``, which gives float32 ``[streams, elements]`` of a stored block."""

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
    """Bit patterns (int64) of non-negative scores; they order like the scores, NaN above everything."""
    import torch

    whole = torch.int32 if scores.dtype == torch.float32 else torch.int64
    # Adding 0 turns -0.0, whose pattern is negative, into 0.0.
    return (scores + 0.0).contiguous().view(whole).long()


def select(
    scores: ScoreFunction, requests: Sequence[SelectionRequest], numel: int
) -> Generator[Fold, Any, list[SelectionThreshold]]:
    """Fold passes that answer ``requests`` about ``numel`` scores; use with ``yield from``.

    A request for a part of the positive scores that comes to none is answered with :data:`NOTHING`.
    """
    if numel >= LARGE:
        cuts = yield from _by_windows(scores, requests, numel)
        if cuts is not None:
            return cuts
    if any(request.k is None for request in requests):
        positive = yield _positive(scores)
        requests = [replace(request, k=_wanted(request, positive[request.stream])) for request in requests]
    asked = [request for request in requests if request.k]
    found = iter((yield from _by_digits(scores, asked)) if asked else [])
    return [next(found) if request.k else NOTHING for request in requests]


def _wanted(request: SelectionRequest, positive: int) -> int:
    return int(int(positive) * request.of_positive) if request.k is None else request.k


def _by_windows(
    scores: ScoreFunction, requests: Sequence[SelectionRequest], numel: int
) -> Generator[Fold, Any, list[SelectionThreshold] | None]:
    """None when the answers were not where a glance has made look for them."""
    windows = yield from glance(scores, requests, numel)
    found = (yield from look(scores, windows)) if windows else []
    if not found:
        return None
    cuts = []
    for request, window, seen in zip(requests, windows, found, strict=True):
        k = _wanted(request, seen.positive)
        place = placed(seen, window, k) if k else None
        if k and place is None:
            return None
        cuts.append(_cut(*place) if place else NOTHING)
    return cuts


def _cut(key: int, wanted: int, tied: int, per_grain: Array) -> SelectionThreshold:
    all_of_them = wanted == tied
    return SelectionThreshold(
        key, wanted, tied, np.empty(0, np.int64) if all_of_them else np.cumsum(per_grain) - per_grain
    )


def _by_digits(
    scores: ScoreFunction, requests: Sequence[SelectionRequest]
) -> Generator[Fold, Any, list[SelectionThreshold]]:
    (shift, width), *rest = DIGITS[scores.dtype]
    histogram = yield _first_digit(scores, shift, width)
    state = [_descend(histogram[request.stream], request.k or 0) for request in requests]
    for shift, width in rest:
        streams = np.array([request.stream for request in requests], np.int64)
        prefixes = np.array([key for key, _, _ in state], np.int64)
        histogram = yield _next_digit(scores, streams, prefixes, shift, width)
        state = [
            ((key << width) | digit, wanted, tied)
            for (key, missing, _), row in zip(state, histogram, strict=True)
            for digit, wanted, tied in [_descend(row, missing)]
        ]
    before = [np.empty(0, np.int64)] * len(state)
    partial = [n for n, (_, wanted, tied) in enumerate(state) if wanted < tied and requests[n].numbered]
    if partial:
        streams = np.array([requests[index].stream for index in partial], np.int64)
        keys = np.array([state[index][0] for index in partial], np.int64)
        per_grain = yield _ties(scores, streams, keys)
        for column, index in enumerate(partial):
            before[index] = np.cumsum(per_grain[:, column]) - per_grain[:, column]
    return [SelectionThreshold(*numbers, ties) for numbers, ties in zip(state, before, strict=True)]


def select_passes(dtype: Literal["float32", "float64"], numel: int, *, numbered: bool = True) -> int:
    """Fold passes that :func:`select` makes for given numbers ``k``: one where a glance tells where to look.

    Else one a digit, and one that numbers equal scores.
    """
    return 1 if numel >= LARGE else len(DIGITS[dtype]) + numbered


def taken(cut: SelectionThreshold, keys: torch.Tensor, block: Block) -> torch.Tensor:
    """``[elements]`` of bool: which scores of a block (as :func:`bits`) are among the k largest."""
    import torch

    if cut.wanted == cut.tied:
        return keys >= cut.key
    equal = keys == cut.key
    grain = block.start // block.grain
    within = block.grains(equal.long())
    offsets = torch.from_numpy(cut.before[grain : grain + len(within)]).to(keys.device)
    rank = (within.cumsum(-1) - 1 + offsets[:, None]).flatten()[: len(keys)]
    return (keys > cut.key) | (equal & ((rank * cut.stride) % cut.tied < cut.wanted))


def value_of(cut: SelectionThreshold, dtype: str) -> float:
    """The k-th largest score itself."""
    whole = np.int32 if dtype == "float32" else np.int64
    return float(np.array(cut.key, whole).view(dtype))


def _positive(scores: ScoreFunction) -> Fold:
    def fused(block: StoredBlock) -> Any:
        assert scores.fused is not None
        return np.count_nonzero(scores.fused.scores(block), axis=1)

    return fold_counts(lambda block: (scores.of(block) > 0).sum(-1), fused if scores.fused else None)


def _first_digit(scores: ScoreFunction, shift: int, width: int) -> Fold:
    def of(block: Block) -> torch.Tensor:
        import torch

        digits = bits(scores.of(block)) >> shift
        return torch.stack([torch.bincount(row, minlength=1 << width) for row in digits])

    return fold_counts(of, scores.fused.first if scores.fused else None)


def _next_digit(scores: ScoreFunction, streams: Array, prefixes: Array, shift: int, width: int) -> Fold:
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


def _ties(scores: ScoreFunction, streams: Array, wanted: Array) -> Fold:
    def of(block: Block) -> torch.Tensor:
        import torch

        keys = bits(scores.of(block))
        rows = [keys[stream] == key for stream, key in zip(streams.tolist(), wanted.tolist(), strict=True)]
        return block.grains(torch.stack(rows).long()).sum(-1).T

    fused = scores.fused
    return fold_grains(of, (lambda block: fused.ties(block, streams, wanted)) if fused else None)


def _descend(histogram: Array, k: int) -> tuple[int, int, int]:
    """Bin in which the k-th largest falls, its rank inside the bin, and how many are in it."""
    # First among groups of bins: running sums over all of them would take longer than counting a small tensor.
    size = min(len(histogram), _GROUP)
    group, missing, _ = _from_top(histogram.reshape(-1, size).sum(1, dtype=np.int64), k)
    digit, wanted, inside = _from_top(histogram[group * size : (group + 1) * size].astype(np.int64), missing)
    return group * size + digit, wanted, inside


def _from_top(counts: Array, k: int) -> tuple[int, int, int]:
    running = np.cumsum(counts[::-1])
    position = int(np.searchsorted(running, k))
    place = len(counts) - 1 - position
    inside = int(counts[place])
    return place, k - int(running[position] - inside), inside

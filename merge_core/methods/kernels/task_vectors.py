"""Kernels for task vectors: sparsify, weight, elect signs. Counterparts of :mod:`merge_core.methods.task_vectors`.

The kernels of SCE get the arguments ``cut``, which is ``(key, quota, tied, stride)``, and ``before`` from a
:class:`merge_core.methods.selection.SelectionThreshold`. A key of -1 selects everything.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.ranks import keep_by_rank, rank_scratch
from mergegate.merge_core.methods.kernels.tiles import (
    LANES,
    TILE,
    add_products,
    add_rows,
    add_sizes,
    compiled,
    inner,
    lane_elements,
    lanes_sum,
    magnitude_bits,
    narrow,
    read_deltas,
    widen,
)
from mergegate.merge_core.methods.masks import MULTIPLIER, ROUNDS, WEYL

_WORD = np.uint64(0xFFFFFFFF)


@compiled
def masked_norms(
    data: Any,
    rows: Any,
    length: int,
    start: int,
    grain: int,
    tile: int,
    kinds: Any,
    cuts: Any,
    before: Any,
    chances: Any,
    spans: Any,
    masks: Any,
) -> Any:
    """Return ``sum|d|`` and ``sum|kept d|`` of each grain, ``[grains, 2, models]``, and store the masks in ``masks``.

    * ``tile``: Number of elements to process at a time.
    * ``kinds``, ``cuts``, ``before``, ``chances``, ``spans``: Tables of :meth:`.sparsify.Sparsifier.tables`.
    * ``masks``: ``[models, bytes]``, the bits of each tile (see :func:`.store_mask`). If it is empty, masks are not
      stored.
    """
    count = len(rows) - 1
    base, delta = np.empty(tile, np.float32), np.empty(lane_elements(tile), np.float32)
    random = np.empty(tile + 2, np.uint32)
    tie_numbers = None if cuts is None else np.zeros((count, 2), np.int64)
    scratch = None if spans is None else rank_scratch(tile)
    lanes = np.empty((2, count, LANES), np.float64)
    grains, eighth = (length + grain - 1) // grain, (tile + 7) // 8
    result = np.empty((grains, 2, count), np.float64)
    for g in range(grains):
        lanes[:] = 0.0
        for first in range(g * grain, min(length, (g + 1) * grain), tile):
            m = min(tile, min(length, (g + 1) * grain) - first)
            widen(data, rows[0] + first, base[:m])
            for i in range(count):
                widen(data, rows[i + 1] + first, delta[:m])
                for j in range(m):
                    delta[j] -= base[j]
                for j in range(m, lane_elements(m)):
                    delta[j] = np.float32(0.0)
                add_sizes(delta, lane_elements(m), lanes[0, i])
                if cuts is not None and first == g * grain:
                    begin_tie_numbers(tie_numbers, cuts, before, i, start // grain + g)
                sparsify(delta, m, start + first, i, kinds, cuts, chances, spans, tie_numbers, random, scratch)
                add_sizes(delta, lane_elements(m), lanes[1, i])
                if masks.shape[1]:
                    store_mask(delta, m, masks[i, first // tile * eighth :][: (m + 7) // 8])
        for side in range(2):
            for i in range(count):
                result[g, side, i] = lanes_sum(lanes[side, i])
    return result


@compiled
def task_vectors(
    data: Any,
    rows: Any,
    length: int,
    start: int,
    grain: int,
    tile: int,
    weights: Any,
    vote: int,
    normalize: bool,
    divisor: Any,
    scale: Any,
    scales: Any,
    kinds: Any,
    cuts: Any,
    before: Any,
    chances: Any,
    spans: Any,
    masks: Any,
    out: Any,
) -> None:
    """Sparsify and combine task vectors, and add them to the base. Counterpart of :func:`.task_vectors.mix`.

    * ``tile``: Number of elements to process at a time.
    * ``weights``: ``[models]``, weights of the task vectors.
    * ``vote``: 0 none, 1 sum, 2 count, 3 kept.
    * ``normalize``: Whether to divide by the sum of the weights that counted.
    * ``divisor``: Divisor if there is no vote.
    * ``scale``: Factor of the combined task vector.
    * ``scales``: ``[models]``, factors of the kept elements.
    * ``kinds``, ``cuts``, ``before``, ``chances``, ``spans``: Tables of :meth:`.sparsify.Sparsifier.tables`. With
      ``masks``, all but ``kinds`` are None.
    * ``masks``: Masks from :func:`masked_norms`. If None or empty, the tables decide which elements to keep.
    """
    count = len(rows) - 1
    base, total, shares = np.empty(tile, np.float32), np.empty(tile, np.float32), np.empty(tile, np.float32)
    elected = np.empty(tile, np.float32)
    weighted = np.empty((count, tile), np.float32)
    random = np.empty(tile + 2, np.uint32)
    tie_numbers = None if cuts is None else np.zeros((count, 2), np.int64)
    scratch = None if spans is None else rank_scratch(tile)
    zero, one, eighth = np.float32(0.0), np.float32(1.0), (tile + 7) // 8
    for first in range(0, length, tile):
        m = min(tile, length - first)
        widen(data, rows[0] + first, base[:m])
        for i in range(count):
            delta, weight, factor = weighted[i], weights[i], scales[i]
            widen(data, rows[i + 1] + first, delta[:m])
            for j in range(m):
                delta[j] -= base[j]
            if masks is not None and masks.shape[1]:
                apply_mask(delta, m, masks[i, first // tile * eighth :][: (m + 7) // 8])
            else:
                if cuts is not None and first % grain == 0:
                    begin_tie_numbers(tie_numbers, cuts, before, i, (start + first) // grain)
                sparsify(delta, m, start + first, i, kinds, cuts, chances, spans, tie_numbers, random, scratch)
            if factor != one:
                for j in range(m):
                    delta[j] *= factor
            for j in range(m):
                delta[j] *= weight
        if vote == 0:
            add_rows(weighted, m, total)
            for j in range(m):
                total[j] /= divisor
        else:
            if vote != 3:
                _elect(weighted, m, vote, elected)
            total[:m] = zero
            shares[:m] = zero
            for i in range(count):
                delta, weight = weighted[i], weights[i]
                for j in range(m):
                    counts = delta[j] != zero if vote == 3 else delta[j] * elected[j] > zero
                    total[j] += delta[j] if counts else zero
                    shares[j] += weight if counts else zero
            if normalize:
                for j in range(m):
                    total[j] /= one if shares[j] == zero else shares[j]
        for j in range(m):
            total[j] = base[j] + total[j] * scale
        narrow(total[:m], out, first)


@inner
def _elect(weighted_vectors: Any, m: int, vote: int, elected_signs: Any) -> None:
    elected_signs[:m] = np.float32(0.0)
    for i in range(len(weighted_vectors)):
        delta = weighted_vectors[i]
        for j in range(m):
            value = delta[j]
            elected_signs[j] += value if vote == 1 else np.float32(value > 0) - np.float32(value < 0)
    for j in range(m):
        elected_signs[j] = np.float32(1.0) if elected_signs[j] >= np.float32(0.0) else np.float32(-1.0)


@compiled
def variances(data: Any, rows: Any, length: int) -> Any:
    """Return the population variance of the task vectors at each position: ``[1, elements]``."""
    count = len(rows) - 1
    base, deltas = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32)
    mean, result = np.empty(TILE, np.float32), np.empty((1, length), np.float32)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        read_deltas(data, rows, first, m, base, deltas)
        _variance(deltas, m, mean, result[0, first : first + m])
    return result


@compiled
def energies(data: Any, rows: Any, length: int, start: int, grain: int, cut: Any, before: Any) -> Any:
    """Return the sum of squares of each task vector's selected elements in each grain: ``[grains, models]``."""
    count = len(rows) - 1
    base, deltas = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32)
    mean, variance = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    squared, lanes = np.empty(TILE, np.float64), np.empty((count, LANES), np.float64)
    result, tie_number = np.empty(((length + grain - 1) // grain, count), np.float64), np.empty(1, np.int64)
    tie_number[0] = 0
    for g in range(len(result)):
        lanes[:] = 0.0
        for first in range(g * grain, min(length, (g + 1) * grain), TILE):
            m = min(TILE, min(length, (g + 1) * grain) - first)
            read_deltas(data, rows, first, m, base, deltas)
            if first == g * grain:
                begin_numbering(tie_number, cut, before, start // grain + g)
            _select(deltas, m, mean, variance, cut, tie_number)
            for i in range(count):
                delta = deltas[i]
                for j in range(m):
                    squared[j] = delta[j]
                for j in range(m, lane_elements(m)):
                    squared[j] = 0.0
                add_products(squared, squared, lane_elements(m), lanes[i])
        for i in range(count):
            result[g, i] = lanes_sum(lanes[i])
    return result


@compiled
def sce(
    data: Any, rows: Any, length: int, start: int, grain: int, cut: Any, before: Any, weights: Any, least: Any, out: Any
) -> None:
    """Write ``b + sum c_i D_i E_i / max(sum c_i E_i, least)`` for the selected elements, and ``b`` for the others."""
    count = len(rows) - 1
    base, deltas = np.empty(TILE, np.float32), np.empty((count, TILE), np.float32)
    mean, variance = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    votes, merged, divisor = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    tie_number, zero = np.empty(1, np.int64), np.float32(0.0)
    tie_number[0] = 0
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        read_deltas(data, rows, first, m, base, deltas)
        if first % grain == 0:
            begin_numbering(tie_number, cut, before, (start + first) // grain)
        _select(deltas, m, mean, variance, cut, tie_number)
        add_rows(deltas, m, votes)
        merged[:m] = zero
        divisor[:m] = zero
        for i in range(count):
            delta, weight = deltas[i], weights[i]
            for j in range(m):
                agrees = delta[j] > zero if votes[j] >= zero else delta[j] < zero
                merged[j] += delta[j] * weight if agrees else zero
                divisor[j] += weight if agrees else zero
        for j in range(m):
            merged[j] = base[j] + merged[j] / (divisor[j] if divisor[j] > least else least)
        narrow(merged[:m], out, first)


@inner
def _variance(deltas: Any, m: int, mean: Any, variance: Any) -> None:
    count = np.float32(len(deltas))
    add_rows(deltas, m, mean)
    for j in range(m):
        mean[j] /= count
    for i in range(len(deltas)):
        delta = deltas[i]
        for j in range(m):
            deviation = delta[j] - mean[j]
            variance[j] = deviation * deviation if i == 0 else variance[j] + deviation * deviation
    for j in range(m):
        variance[j] /= count


@inner
def _select(deltas: Any, m: int, mean: Any, variance: Any, cut: Any, tie_number: Any) -> None:
    """Set task vectors to zero at positions whose variance is not among the largest."""
    if cut[0] < 0:
        return
    _variance(deltas, m, mean, variance[:m])
    key, zero = np.uint32(cut[0]), np.float32(0.0)
    if cut[1] < cut[2]:  # Only some ties are selected: those that the stride maps below the quota.
        keep_tied(variance, m, cut, 0, cut[1], tie_number)
    for i in range(len(deltas)):
        delta = deltas[i]
        for j in range(m):
            delta[j] = delta[j] if magnitude_bits(variance[j]) >= key else zero


@inner
def sparsify(
    delta: Any,
    m: int,
    index: int,
    model: int,
    kinds: Any,
    cuts: Any,
    chances: Any,
    spans: Any,
    tie_numbers: Any,
    random: Any,
    scratch: Any,
) -> None:
    """Set the dropped elements of one model's task vector to zero.

    :meth:`.sparsify.Sparsifier.tables` describes the tables. Numba omits the code for tables that are None.
    """
    kind, zero = kinds[model], np.float32(0.0)
    if kind == 1:
        delta[:m] = zero
    elif cuts is not None and kind == 2:
        low, high = cuts[model, 0], cuts[model, 1]
        low_part, high_part = low[1] < low[2], high[1] < high[2]
        least, most = np.uint32(low[0]), np.uint32(high[0] if high_part else high[0] - 1)
        for j in range(m):
            delta[j] = delta[j] if least <= magnitude_bits(delta[j]) <= most else zero
        # Keep elements that the low threshold selects and the high one does not. If they are equal, do it in one pass.
        both = low_part and high_part and low[0] == high[0]
        if low_part:
            keep_tied(delta, m, low, high[1] if both else 0, low[1], tie_numbers[model, :1])
        if high_part and not both:
            keep_tied(delta, m, high, high[1], high[2], tie_numbers[model, 1:])
    elif chances is not None and kind == 3:
        mask_words(chances[model, 1], chances[model, 2], index, m, random)
        shift = index % 2
        limit = np.uint32(chances[model, 0])
        for j in range(m):
            delta[j] = delta[j] if random[j + shift] < limit else zero
    elif spans is not None and kind == 4:
        mask_words(chances[model, 1], chances[model, 2], index, m, random)
        keep_by_rank(delta, m, random[index % 2 :], spans[model, 0], spans[model, 1], scratch)


@inner
def begin_tie_numbers(tie_numbers: Any, cuts: Any, before: Any, model: int, grain: int) -> None:
    """Set the tie numbers of a model at the start of a grain, for both thresholds."""
    for side in range(2):
        begin_numbering(tie_numbers[model, side : side + 1], cuts[model, side], before[model, side], grain)


@inner
def begin_numbering(tie_number: Any, cut: Any, before: Any, grain: int) -> None:
    """Set ``tie_number[0]`` to the number of the first tie in grain ``grain``, mapped by the stride."""
    if 0 < cut[1] < cut[2]:
        tie_number[0] = before[grain] * cut[3] % cut[2]


@inner
def keep_tied(values: Any, m: int, cut: Any, first: int, last: int, tie_number: Any) -> None:
    """Set ties in ``values[:m]`` to zero unless the stride maps their number to ``first`` <= number < ``last``.

    ``cut`` is (key, quota, tied, stride). ``tie_number[0]`` is the mapped number of the next tie, updated in place.
    """
    key, tied, stride, number = np.uint32(cut[0]), cut[2], cut[3], tie_number[0]
    for j in range(m):
        if magnitude_bits(values[j]) == key:
            if number < first or number >= last:
                values[j] = np.float32(0.0)
            number += stride
            number -= tied if number >= tied else 0
    tie_number[0] = number


@compiled
def mask_words(key: int, upper: int, index: int, count: int, words: Any) -> None:
    """Write the random words for elements from ``index - index % 2``. Counterpart of :func:`.masks.mask_words`."""
    first = index // 2
    for p in range((count + 1 + index % 2) // 2):
        low, high = np.uint64((first + p) & 0xFFFFFFFF), np.uint64(upper)
        round_key = np.uint64(key)
        for _ in range(ROUNDS):
            product = low * np.uint64(MULTIPLIER)
            low = (product >> np.uint64(32)) ^ high ^ round_key
            high = product & _WORD
            round_key = (round_key + np.uint64(WEYL)) & _WORD
        words[2 * p] = np.uint32(low)
        words[2 * p + 1] = np.uint32(high)


@inner
def store_mask(delta: Any, m: int, bits: Any) -> None:
    """Store in ``bits`` which elements of the sparsified ``delta[:m]`` are not zero.

    ``bits`` has ``m / 8`` bytes, rounded up. Bit ``t`` of byte ``i`` belongs to element ``t * len(bits) + i``, so that
    loops over bytes are loops over neighboring elements.
    """
    step = len(bits)
    bits[:] = np.uint8(0)
    for t in range(8):
        part = delta[t * step : min((t + 1) * step, m)]
        for i in range(len(part)):
            bits[i] |= np.uint8(magnitude_bits(part[i]) != 0) << np.uint8(t)


@inner
def apply_mask(delta: Any, m: int, bits: Any) -> None:
    """Set the elements of ``delta[:m]`` to zero whose bits :func:`store_mask` did not set."""
    step = len(bits)
    for t in range(8):
        part = delta[t * step : min((t + 1) * step, m)]
        for i in range(len(part)):
            mask = np.uint32(0) - (np.uint32(bits[i]) >> np.uint32(t) & np.uint32(1))
            part[i] = np.uint32(np.float32(part[i]).view(np.uint32) & mask).view(np.float32)

"""Kernels for task vectors: sparsify, weight, elect signs. Counterparts of :mod:`merge_core.methods.task_vectors`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled, inner
from mergegate.merge_core.methods.kernels.ranks import rank_scratch
from mergegate.merge_core.methods.kernels.sparsify import apply_mask, begin_tie_numbers, sparsify, store_mask
from mergegate.merge_core.methods.kernels.tiles import (
    LANES,
    add_rows,
    add_sizes,
    lane_elements,
    lanes_sum,
    narrow,
    widen,
)


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

"""Kernels for averages over rounds and for the Adam step. Counterparts of :mod:`merge_core.methods.adaptive`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergegate.merge_core.methods.kernels.compilation import compiled
from mergegate.merge_core.methods.kernels.tiles import TILE, narrow, widen


@compiled
def moving_average(data: Any, rows: Any, length: int, keep: Any, share: Any, squared: bool, out: Any) -> None:
    """Write ``keep`` times the third input, if there is one, plus ``share`` times the change or its square."""
    base, change, before = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        widen(data, rows[1] + first, change[:m])
        for j in range(m):
            change[j] -= base[j]
        if squared:
            for j in range(m):
                change[j] *= change[j]
        for j in range(m):
            change[j] *= share
        if len(rows) > 2:
            widen(data, rows[2] + first, before[:m])
            for j in range(m):
                change[j] = before[j] * keep + change[j]
        narrow(change[:m], out, first)


@compiled
def adam(data: Any, rows: Any, length: int, rate: Any, tau: Any, out: Any) -> None:
    """Write ``b + rate m / (sqrt(max(v, 0)) + tau)``."""
    base, mean, squares = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    zero = np.float32(0.0)
    for first in range(0, length, TILE):
        m = min(TILE, length - first)
        widen(data, rows[0] + first, base[:m])
        widen(data, rows[1] + first, mean[:m])
        widen(data, rows[2] + first, squares[:m])
        for j in range(m):
            base[j] += mean[j] * rate / (np.sqrt(max(squares[j], zero)) + tau)
        narrow(base[:m], out, first)

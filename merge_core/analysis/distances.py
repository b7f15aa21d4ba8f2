"""What follows from how far models are from each other: who is left out, and whose voice counts how much.

Pure: all of it is in the Gram matrix of the task vectors of whole models (``Tally.gram``)::

    outliers(gram, beyond=5)                  # {3: 12.4}: the fourth is 12.4 times as long as the median
    geometric_median(gram, [1, 1, 1])         # shares that add up to 1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Weiszfeld's steps, and the distance (over the median length) below which a model is where the point is.
_STEPS, _SMOOTH = 200, 1e-6


def find_outliers(gram: Sequence[Sequence[float]], beyond: float) -> dict[int, float]:
    """Task vectors that are more than ``beyond`` times as long as the median one, with how many times.

    A model that was not trained at all is no outlier; where half of them were not, nobody is.
    """
    lengths = np.sqrt(np.maximum(np.diagonal(np.asarray(gram, float)), 0))
    middle = float(np.median(lengths))
    if not middle > 0:
        return {}
    return {at: float(one / middle) for at, one in enumerate(lengths) if one > beyond * middle}


def normalized_lengths_and_distances(gram: Sequence[Sequence[float]]) -> list[tuple[float, float | None]]:
    """Of each task vector its length, and its median distance to the others (None: there are none), both over the
    median length."""
    products = np.asarray(gram, float)
    squares = np.maximum(np.diagonal(products), 0)
    middle = float(np.median(np.sqrt(squares))) or 1.0
    apart = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * products, 0))
    found: list[tuple[float, float | None]] = []
    for at, own in enumerate(squares):
        others = np.delete(apart[at], at)
        found.append((float(np.sqrt(own)) / middle, float(np.median(others)) / middle if len(others) else None))
    return found


def geometric_median(gram: Sequence[Sequence[float]], voices: Sequence[float]) -> tuple[float, ...]:
    """Shares of the task vectors in the point whose weighted sum of distances to all of them is least.

    Weiszfeld's algorithm, which only needs products (Pillutla et al. 2022, https://arxiv.org/abs/1912.13445): however
    far less than half of the voices go, the point stays with the others.

    Args:
        gram: ``[models, models]``.
        voices: How much each counts; not negative, one at least above 0.
    """
    products = np.asarray(gram, float)
    given = np.asarray(voices, float) / np.sum(voices)
    squares = np.diagonal(products)
    scale = float(np.median(squares)) or float(squares.mean()) or 1.0
    shares = given
    for _ in range(_STEPS):
        away = np.diagonal(products) - 2 * products @ shares + shares @ products @ shares
        pull = given / np.sqrt(np.maximum(away, 0) / scale + _SMOOTH**2)
        shares = pull / pull.sum()
    return tuple(shares.tolist())

"""Find outlier models and compute robust model weights from the Gram matrix of whole task vectors (``Tally.gram``).

::

    find_outliers(gram, max_ratio=5)          # {3: 12.4}: model 3's task vector is 12.4 times as long as the median
    geometric_median(gram, [1, 1, 1])         # shares that add up to 1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Number of steps of Weiszfeld's algorithm, and the smoothing distance relative to the median length. It keeps the
# weights finite when the point coincides with a model.
_STEPS, _SMOOTH = 200, 1e-6


def find_outliers(gram: Sequence[Sequence[float]], max_ratio: float) -> dict[int, float]:
    """Find the task vectors that are more than ``max_ratio`` times as long as the median task vector.

    Return the length of each as a multiple of the median length, by index. The result is empty if the median is zero,
    that is, if more than half of the models equal the base.
    """
    lengths = np.sqrt(np.maximum(np.diagonal(np.asarray(gram, float)), 0))
    median_length = float(np.median(lengths))
    if not median_length > 0:
        return {}
    return {
        index: float(length / median_length)
        for index, length in enumerate(lengths)
        if length > max_ratio * median_length
    }


def normalized_lengths_and_distances(gram: Sequence[Sequence[float]]) -> list[tuple[float, float | None]]:
    """Return the length of each task vector and its median distance to the other task vectors.

    Both are multiples of the median length. A single task vector has the distance None.
    """
    products = np.asarray(gram, float)
    squares = np.maximum(np.diagonal(products), 0)
    median_length = float(np.median(np.sqrt(squares))) or 1.0
    distances = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * products, 0))
    results: list[tuple[float, float | None]] = []
    for index, square in enumerate(squares):
        other_distances = np.delete(distances[index], index)
        results.append(
            (
                float(np.sqrt(square)) / median_length,
                float(np.median(other_distances)) / median_length if len(other_distances) else None,
            )
        )
    return results


def geometric_median(gram: Sequence[Sequence[float]], model_weights: Sequence[float]) -> tuple[float, ...]:
    """Return the share of each task vector in their geometric median. The shares add up to 1.

    The geometric median minimizes the weighted sum of distances to all task vectors. It is computed with Weiszfeld's
    algorithm, which only needs the Gram matrix (Pillutla et al. 2022, https://arxiv.org/abs/1912.13445). Models with
    less than half of the total weight cannot pull the point far from the others. Model weights must not be negative,
    and at least one must be positive.
    """
    products = np.asarray(gram, float)
    weights = np.asarray(model_weights, float) / np.sum(model_weights)
    squares = np.diagonal(products)
    scale = float(np.median(squares)) or float(squares.mean()) or 1.0
    shares = weights
    for _ in range(_STEPS):
        square_distances = np.diagonal(products) - 2 * products @ shares + shares @ products @ shares
        pull = weights / np.sqrt(np.maximum(square_distances, 0) / scale + _SMOOTH**2)
        shares = pull / pull.sum()
    return tuple(shares.tolist())

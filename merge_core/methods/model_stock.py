"""Merge by Model Stock: move from the base towards the average of the models, further if their changes are similar.

With the offsets ``o_i = x_i - b`` of ``N`` models and the mean cosine ``c`` of all pairs of offsets,
``t = N c / (1 + (N - 1) c)`` and ``out = b + t * mean(o_i)``. Jang et al. 2024, https://arxiv.org/abs/2403.19522.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.methods.combination import combine, gram
from mergegate.merge_core.methods.contract import (
    GRAIN,
    Block,
    Costs,
    Map,
    Method,
    Parameter,
    Steps,
    TensorTask,
    add_in_order,
    row_length,
)

if TYPE_CHECKING:
    import torch

# Lower bound for a product of norms, so that tiny tensors move less.
_LEAST_NORMS = 1e-6


def _steps(task: TensorTask) -> Steps:
    count = len(task.per_input) - 1
    if task.shared["filter_wise"]:

        def map_block(block: Block) -> torch.Tensor:
            import torch

            offsets = block.grains(block.deltas())
            wide = offsets.double()
            products = {
                (i, j): (wide[i] * wide[j]).sum(-1).cpu().numpy() for i in range(count) for j in range(i, count)
            }
            share = torch.from_numpy(np.asarray(ratio(products, count)) / count).to(offsets)
            return block.base + (add_in_order(list(offsets)) * share.unsqueeze(-1)).flatten()

        return Map(map_block)
    matrix = yield gram(count, about_base=True)
    share = float(ratio({(i, j): matrix[i, j] for i in range(count) for j in range(i, count)}, count))
    return combine([share / count] * count, about_base=True)


def ratio(products: dict[tuple[int, int], Any], count: int) -> Any:
    """Return ``t`` from the products of each pair of offsets ``i <= j``, which may be numbers or arrays."""
    if count < 2:
        return np.ones_like(products[0, 0])
    norms = [np.sqrt(products[i, i]) for i in range(count)]
    cosines = [
        np.clip(products[i, j] / np.maximum(norms[i] * norms[j], _LEAST_NORMS), -1.0, 1.0)
        for i, j in combinations(range(count), 2)
    ]
    cosine = sum(cosines) / len(cosines)
    divisor = 1.0 + (count - 1) * cosine
    degenerate = np.abs(divisor) < 1e-6
    return np.where(degenerate, 0.0, count * cosine / np.where(degenerate, 1.0, divisor))


METHODS = (
    Method(
        name="model_stock",
        summary="From the base towards the average of the models, as far as their angles allow",
        paper="Model Stock, Jang et al. 2024, https://arxiv.org/abs/2403.19522",
        base="required",
        models=(2, None),
        parameters=(Parameter("filter_wise", "bool", "shared", False, "an angle for each row instead of each tensor"),),
        steps=_steps,
        grain=lambda shape, shared: row_length(shape, shared) if shared["filter_wise"] else GRAIN,
        single_input="copy",
        costs=Costs(map=0.6, fold=1.4, folds=lambda task: 0 if task.shared["filter_wise"] else 1),
    ),
)

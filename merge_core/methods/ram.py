"""Merge by RAM: average the elements that several models changed, and keep or amplify an element that one changed.

With ``D_i = x_i - b``, an element is changed if ``|D_i| > epsilon``. With the number ``c`` of models that changed it,
``out = b + sum_i D_i [changed_i] (L_i if c == 1 else 1 / c)``. Plain RAM has ``L_i = 1``. RAM+ amplifies the changes
that are unique to a model by the share of its changes that others made too:
``L_i = 1 + r * clip(shared_i / unique_i, 0, alpha)``. Yuan et al. 2026, https://arxiv.org/abs/2601.13572.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.methods.contract import (
    Block,
    Costs,
    Map,
    Method,
    Parameter,
    Steps,
    StoredBlock,
    TensorTask,
    fold_counts,
    load_kernels,
    map_only,
)

if TYPE_CHECKING:
    import torch

_EPSILON = Parameter("epsilon", "float", "shared", 1e-5, "a smaller difference does not count as a change", minimum=0.0)


def _amplified(task: TensorTask) -> Steps:
    epsilon, r, alpha = (float(task.shared[name]) for name in ("epsilon", "r", "alpha"))

    def reduce_block(block: Block) -> torch.Tensor:
        import torch

        changed = block.deltas().abs() > epsilon
        several = changed.sum(0) > 1
        return torch.stack(((changed & several).sum(-1), (changed & ~several).sum(-1)))

    shared, unique = yield fold_counts(
        reduce_block,
        lambda block: load_kernels().count_changes(block.data, block.rows, block.length, np.float32(epsilon)),
    )
    factors = [
        1 + r * min(max(shared_count / max(unique_count, epsilon), 0.0), alpha)
        if max(unique_count, epsilon) > 0
        else 1 + r * alpha
        for shared_count, unique_count in zip(shared.tolist(), unique.tolist(), strict=True)
    ]
    return _average_changes(factors, epsilon)


def _average_changes(factors: Sequence[float], epsilon: float) -> Map:
    """Return the map that adds the changes to the base, with one factor per model for those that it alone made."""

    def map_block(block: Block) -> torch.Tensor:
        import torch

        deltas = block.deltas()
        changed = deltas.abs() > epsilon
        number = changed.sum(0)
        total = torch.zeros_like(block.base)
        for delta, is_changed, factor in zip(deltas, changed, factors, strict=True):
            scale = torch.where(number == 1, factor, 1 / number.clamp(min=1).to(delta.dtype))
            total = total + torch.where(is_changed, delta * scale, 0.0)
        return block.base + total

    def map_stored(block: StoredBlock, out: Any) -> None:
        scales = np.array(factors, np.float32)
        load_kernels().ram(block.data, block.rows, block.length, np.float32(epsilon), scales, out)

    return Map(map_block, map_stored)


_PAPER = "RAM, Yuan et al. 2026, https://arxiv.org/abs/2601.13572"
METHODS = (
    Method(
        name="ram",
        summary="Average what several models changed, keep what only one changed",
        paper=_PAPER,
        base="required",
        models=(1, None),
        parameters=(_EPSILON,),
        steps=map_only(lambda task: _average_changes([1.0] * (len(task.per_input) - 1), float(task.shared["epsilon"]))),
        costs=Costs(map=1.4),
    ),
    Method(
        name="ramplus_tl",
        summary="RAM that amplifies what only one model changed, per tensor",
        paper=_PAPER,
        base="required",
        models=(1, None),
        parameters=(
            Parameter("r", "float", "shared", 0.1, "strength of the amplification"),
            Parameter("alpha", "float", "shared", 0.2, "largest ratio of shared to unique changes that counts"),
            _EPSILON,
        ),
        steps=_amplified,
        costs=Costs(map=1.2, fold=1.0, folds=lambda task: 1),
    ),
)

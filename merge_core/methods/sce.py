"""Merge by SCE: select the elements that vary most between models, calculate model weights, erase minority signs.

Of the task vectors ``D_i = x_i - b``, the method keeps the positions with the highest variance over the models. ``c_i``
is the share of model i in the mean squares of all models, and ``E_i`` is 1 where ``D_i`` has the majority sign, else 0:
``out = b + sum c_i D_i E_i / max(sum c_i E_i, 1e-6)``. Wan et al. 2024, https://arxiv.org/abs/2408.07990.
"""

from __future__ import annotations

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
    add_in_order,
    fold_sums,
    load_kernels,
)
from mergegate.merge_core.methods.scores import ScoreFunction, SelectionRequest, count_stored_scores, score_bits
from mergegate.merge_core.methods.selection import NOTHING, SelectionThreshold, select, select_passes, selection_mask
from mergegate.merge_core.methods.windows import LARGE

if TYPE_CHECKING:
    import torch

# If the mean squares add up to less than this, all models get equal weights. The reference implementation uses the same
# absolute bound.
_NO_SHARES = 1e-6
_LEAST_DIVISOR = 1e-6


def _steps(task: TensorTask) -> Steps:
    share = float(task.shared["select_topk"])
    threshold: SelectionThreshold | None = None
    if share < 1:
        stored_variances = count_stored_scores(
            lambda block: load_kernels().variances(block.data, block.rows, block.length)
        )
        scores = ScoreFunction(lambda block: _variance(block).unsqueeze(0), task.dtype, stored_variances)
        (threshold,) = yield from select(scores, [SelectionRequest(0, None, of_positive=share)], task.numel)
        if threshold is NOTHING:
            return Map(lambda block: block.base)

    def keep_selected(block: Block) -> torch.Tensor:
        import torch

        deltas = block.deltas()
        if threshold is None:
            return deltas
        return torch.where(selection_mask(threshold, score_bits(_variance(block)), block), deltas, 0.0)

    table = np.array(
        (threshold.key, threshold.quota, threshold.tied, threshold.stride) if threshold else (-1, 0, 0, 1), np.int64
    )
    before = threshold.before if threshold else np.empty(0, np.int64)

    def reduce_stored(block: StoredBlock) -> Any:
        arguments = (block.start, block.grain, table, before)
        return load_kernels().energies(block.data, block.rows, block.length, *arguments)

    squares = yield fold_sums(lambda block: block.grain_sums(keep_selected(block).double() ** 2), reduce_stored)
    means = [float(value) / task.numel for value in squares]
    total = sum(means)
    weights = [mean / total if total >= _NO_SHARES else 1 / len(means) for mean in means]

    def map_block(block: Block) -> torch.Tensor:
        import torch

        deltas = keep_selected(block)
        positive = add_in_order(list(deltas)) >= 0
        merged, divisor = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
        for delta, weight in zip(deltas, weights, strict=True):
            agrees = torch.where(positive, delta > 0, delta < 0)
            merged = merged + torch.where(agrees, delta * weight, 0.0)
            divisor = divisor + agrees.to(delta.dtype) * weight
        return block.base + merged / divisor.clamp(min=_LEAST_DIVISOR)

    def map_stored(block: StoredBlock, out: Any) -> None:
        shares, least = np.array(weights, np.float32), np.float32(_LEAST_DIVISOR)
        arguments = (block.start, block.grain, table, before, shares, least)
        load_kernels().sce(block.data, block.rows, block.length, *arguments, out)

    return Map(map_block, map_stored)


def _variance(block: Block) -> torch.Tensor:
    """Return the population variance of the task vectors at each position: ``[elements]``."""
    deltas = block.deltas()
    mean = add_in_order(list(deltas)) / len(deltas)
    return add_in_order([(delta - mean) ** 2 for delta in deltas]) / len(deltas)


METHODS = (
    Method(
        name="sce",
        summary="Keep what varies most between models, weigh models by their energy, erase minority signs",
        paper="SCE (FuseChat), Wan et al. 2024, https://arxiv.org/abs/2408.07990",
        base="required",
        models=(1, None),
        parameters=(
            Parameter("select_topk", "float", "shared", 1.0, "share of the varying elements that is kept", 0.0, 1.0),
            Parameter("int8_mask", "bool", "shared", False, "accepted for compatibility, has no effect"),
        ),
        steps=_steps,
        costs=Costs(
            map=2.3,
            fold=2.0,
            # The passes count the varying elements, select among them, and measure the energy of each model.
            folds=lambda task: (
                1
                if task.shared["select_topk"] >= 1
                else 1 + select_passes(task.dtype, task.numel) + (task.numel < LARGE)
            ),
        ),
    ),
)

"""Add up task vectors only in the elements that several models need (Consensus Task Arithmetic).

With ``v_i = w_i (x_i - b)`` and ``T = sum v_i``, model i needs an element if

    |v_i| > threshold * |T - v_i|

An element that fewer than ``agreement`` models need keeps the value of the base. If only one model needs it, that
model often works without it, and if no model needs it, it is noise. Wang et al. 2024, https://arxiv.org/abs/2405.07813
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
    StoredBlock,
    TensorTask,
    Traits,
    add_in_order,
    load_kernels,
    map_only,
)
from mergegate.merge_core.methods.task_vectors import LAMBDA, WEIGHT

if TYPE_CHECKING:
    import torch


def _consensus(task: TensorTask) -> Map:
    weights, thresholds = task.model_values("weight"), task.model_values("threshold")
    agreement, scale = int(task.shared["agreement"]), float(task.shared["lambda"])

    def map_block(block: Block) -> torch.Tensor:
        import torch

        weighted = [delta * weight for delta, weight in zip(block.deltas(), weights, strict=True)]
        total = add_in_order(weighted)
        needed = torch.zeros(total.shape, dtype=torch.int32, device=total.device)
        for vector, threshold in zip(weighted, thresholds, strict=True):
            needed += vector.abs() > (total - vector).abs() * threshold
        return block.base + torch.where(needed >= agreement, total, 0.0) * scale

    def map_stored(block: StoredBlock, out: Any) -> None:
        arguments = (np.asarray(weights, np.float32), np.asarray(thresholds, np.float32), agreement, np.float32(scale))
        load_kernels().consensus(block.data, block.rows, block.length, *arguments, out)

    return Map(map_block, map_stored)


METHODS = (
    Method(
        name="consensus_ta",
        summary="Add up task vectors where at least two models need the element, keep the base elsewhere",
        paper="Consensus Task Arithmetic (TALL masks), Wang et al. 2024, https://arxiv.org/abs/2405.07813",
        base="required",
        models=(1, None),
        parameters=(
            WEIGHT,
            Parameter(
                "threshold",
                "float",
                "non_base",
                0.4,
                "minimum size of a needed element, relative to the sum of the other models",
                0.0,
            ),
            Parameter("agreement", "int", "shared", 2, "minimum number of models that need an element", 1),
            LAMBDA,
        ),
        steps=map_only(_consensus),
        costs=Costs(map=1.4),
        traits=Traits(adapters="products"),
    ),
)

"""Average each element of the models, weighted by its importance to each model (Fisher merging).

``F_i`` is the diagonal of the Fisher information of model i, measured on a calibration text for that model. Then

    x = sum w_i F_i x_i / sum w_i F_i

is the most likely point if each model's posterior is a Gaussian around its weights with the precision ``F_i`` (Matena &
Raffel 2022, https://arxiv.org/abs/2111.09832). It is computed as ``m + sum w_i F_i (x_i - m) / sum w_i F_i`` around the
mean ``m``, so that an element without importance to any model becomes the mean. There is no lower bound for ``F_i``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mergegate.merge_core.methods.combination import check_mean, mean_of_models
from mergegate.merge_core.methods.contract import (
    Block,
    Costs,
    Map,
    Method,
    Parameter,
    TensorTask,
    Traits,
    add_in_order,
    map_only,
)
from mergegate.merge_core.methods.task_vectors import LAMBDA

if TYPE_CHECKING:
    import torch


def _average_by_importance(task: TensorTask) -> Map:
    """Return the map to the weighted mean, or to the plain mean if importance was not measured."""
    if not task.has_importance:
        return mean_of_models(task)
    weights, scale = task.model_values("weight"), float(task.shared["lambda"])
    shares = [weight / sum(weights) for weight in weights]

    def map_block(block: Block) -> torch.Tensor:
        import torch

        assert block.importance is not None
        models = block.inputs[1:] if task.has_base else block.inputs
        precisions = [item * weight for item, weight in zip(block.importance, weights, strict=True)]
        total = add_in_order(precisions)
        mean = add_in_order([item * share for item, share in zip(models, shares, strict=True)])
        offset = add_in_order(
            [(item - mean) * (precision / total) for item, precision in zip(models, precisions, strict=True)]
        )
        merged = mean + torch.where(total > 0, offset, 0.0)
        return block.base + (merged - block.base) * scale if task.has_base and scale != 1 else merged

    return Map(map_block)


METHODS = (
    Method(
        name="fisher",
        formula="x = Σ w_i F_i x_i / Σ w_i F_i, F_i = squared derivative of the log-likelihood",
        summary="Average of each element, weighted by its importance to each model on its own calibration text",
        paper="Fisher merging, Matena & Raffel 2022, https://arxiv.org/abs/2111.09832",
        base="optional",
        models=(1, None),
        parameters=(Parameter("weight", "float", "non_base", 1.0, "weight of each model", 0.0), LAMBDA),
        steps=map_only(_average_by_importance),
        check=check_mean,
        costs=Costs(map=12.0),
        traits=Traits(reads_text="importance"),
    ),
)

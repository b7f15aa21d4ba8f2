"""Merge by robust averages of each element: the median of the models, or their mean without the extremes.

A mean follows a single model as far as that model goes; these methods do not. They sort the task vectors
``d_i = x_i - b`` by value in each element and average those in the middle:

    out = b + lambda * mean(d_(k), ..., d_(n - 1 - k))

The trimmed mean leaves out ``k = floor(trim * n)`` on each side. The median leaves out as many as it takes to keep one
or two. The sign, size and position of the trimmed values do not matter, so fewer than half of the models cannot take
over the result. The price: if models differ for good reasons, because each has its own skill, the methods also drop
what only a few models have.

Yin et al. 2018, https://arxiv.org/abs/1803.01498

The geometric median works on whole models instead of elements. It is the point with the smallest sum of distances to
all models, and therefore a mean. Its weights follow from the Gram matrix of all task vectors, which is measured before
the merge (:func:`merge_core.analysis.geometric_median`). It keeps what only a few models have, in proportion to their
share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.methods.combination import check_mean, combine
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
from mergegate.merge_core.methods.task_vectors import LAMBDA

if TYPE_CHECKING:
    import torch

_PAPER = "Byzantine-robust distributed learning, Yin et al. 2018, https://arxiv.org/abs/1803.01498"
_TRIM = Parameter("trim", "float", "shared", 0.2, "share of the models to leave out on each side", 0.0, 0.49)


def _average_middle(skipped: int, scale: float) -> Map:
    """Return the map that adds to the base the mean of the task vectors.

    The mean leaves out the ``skipped`` lowest and highest values of each element.
    """

    def map_block(block: Block) -> torch.Tensor:
        ordered = block.deltas().sort(0).values
        middle = ordered[skipped : len(ordered) - skipped]
        return block.base + add_in_order(list(middle)) / len(middle) * scale

    def map_stored(block: StoredBlock, out: Any) -> None:
        load_kernels().trimmed_middle(block.data, block.rows, block.length, skipped, np.float32(scale), out)

    return Map(map_block, map_stored)


def _trimmed_mean(task: TensorTask) -> Map:
    # The small addend corrects floating-point rounding: a share of 0.2 of five models is one model.
    skipped = math.floor(float(task.shared["trim"]) * (len(task.per_input) - 1) + 1e-9)
    return _average_middle(skipped, float(task.shared["lambda"]))


def _weighted_mean(task: TensorTask) -> Map:
    weights, scale = task.model_values("weight"), float(task.shared["lambda"])
    return combine([weight / sum(weights) * scale for weight in weights], about_base=True)


METHODS = (
    Method(
        name="geometric_median",
        summary="The base plus the point with the smallest sum of distances to the task vectors of whole models",
        paper="Robust aggregation, Pillutla et al. 2022, https://arxiv.org/abs/1912.13445",
        base="required",
        models=(1, None),
        parameters=(
            Parameter(
                "weight", "float", "non_base", 1.0, "weight of each model, for example its number of samples", 0.0
            ),
            LAMBDA,
        ),
        steps=map_only(_weighted_mean),
        check=check_mean,
        costs=Costs(map=1.5),
        traits=Traits(weights_by_distance=True),
    ),
    Method(
        name="median",
        summary="The base plus the median of the task vectors, element by element",
        paper=_PAPER,
        base="required",
        models=(1, None),
        parameters=(LAMBDA,),
        steps=map_only(lambda task: _average_middle((len(task.per_input) - 2) // 2, float(task.shared["lambda"]))),
        costs=Costs(map=0.9),
        traits=Traits(adapters="products"),
    ),
    Method(
        name="trimmed_mean",
        summary="The base plus the mean of the task vectors without the extremes of each element",
        paper=_PAPER,
        base="required",
        models=(1, None),
        parameters=(_TRIM, LAMBDA),
        steps=map_only(_trimmed_mean),
        costs=Costs(map=0.9),
        traits=Traits(adapters="products"),
    ),
)

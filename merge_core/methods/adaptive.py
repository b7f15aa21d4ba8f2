"""Implement the server step of federated Adam (FedAdam) and the moving averages that it needs, as three methods.

FedAdam treats ``d = x - b``, the merged change of all clients in a round, as a gradient:

    m' = beta1 m + (1 - beta1) d            ``moving_mean``, keep beta1
    v' = beta2 v + (1 - beta2) d²           ``moving_squares``, keep beta2
    out = b + rate * m' / (sqrt(v') + tau)  ``adam``

Both averages start from zero, without a bias correction for the first rounds. Steps for changes that are small
compared with ``tau`` are proportional to the changes. ``m`` and ``v`` are stored like models, but always in float32.

Reddi et al. 2020, https://arxiv.org/abs/2003.00295, algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.methods.contract import (
    REQUIRED,
    Block,
    Costs,
    Map,
    Method,
    Parameter,
    StoredBlock,
    TensorTask,
    Traits,
    load_kernels,
    map_only,
)

if TYPE_CHECKING:
    import torch

_PAPER = "Adaptive federated optimization (FedAdam), Reddi et al. 2020, https://arxiv.org/abs/2003.00295"


def _moving_average(task: TensorTask, *, squared: bool) -> Map:
    """Return the map ``keep * average + (1 - keep) * d``, or with ``d²`` if ``squared``.

    The previous average is the second model. If there is none, it counts as zero.
    """
    keep, has_average = float(task.shared["keep"]), len(task.per_input) > 2

    def map_block(block: Block) -> torch.Tensor:
        change = block.inputs[1] - block.base
        contribution = (change * change if squared else change) * (1.0 - keep)
        return block.inputs[2] * keep + contribution if has_average else contribution

    def map_stored(block: StoredBlock, out: Any) -> None:
        shares = (np.float32(keep), np.float32(1.0 - keep))
        load_kernels().moving_average(block.data, block.rows, block.length, *shares, squared, out)

    return Map(map_block, map_stored)


def _adam(task: TensorTask) -> Map:
    """Return the map ``b + rate m / (sqrt(max(v, 0)) + tau)``."""
    rate, tau = float(task.shared["rate"]), float(task.shared["tau"])

    def map_block(block: Block) -> torch.Tensor:
        size = block.inputs[2].clamp(min=0.0).sqrt() + tau
        return block.base + block.inputs[1] * rate / size

    def map_stored(block: StoredBlock, out: Any) -> None:
        load_kernels().adam(block.data, block.rows, block.length, np.float32(rate), np.float32(tau), out)

    return Map(map_block, map_stored)


def _keep(default: float) -> Parameter:
    return Parameter("keep", "float", "shared", default, "share of the previous mean to keep", 0.0, 1.0)


METHODS = (
    Method(
        name="moving_mean",
        formula="m = keep · m + (1 - keep) (x - b)",
        summary="Mean over rounds of the change of a model; the second model is the previous mean",
        paper=_PAPER,
        base="required",
        models=(1, 2),
        parameters=(_keep(0.9),),
        steps=map_only(lambda task: _moving_average(task, squared=False)),
        costs=Costs(map=0.6),
        traits=Traits(may_zero=True, first_state=1, makes_state=True),
    ),
    Method(
        name="moving_squares",
        formula="v = keep · v + (1 - keep) (x - b)²",
        summary="Mean over rounds of the squared change of a model; the second model is the previous mean",
        paper=_PAPER,
        base="required",
        models=(1, 2),
        parameters=(_keep(0.99),),
        steps=map_only(lambda task: _moving_average(task, squared=True)),
        costs=Costs(map=0.6),
        traits=Traits(may_zero=True, first_state=1, makes_state=True),
    ),
    Method(
        name="adam",
        formula="x = b + rate · m / (sqrt(v) + tau)",
        summary="The base plus a step of Adam: the moving mean of the changes over the root of their mean square",
        paper=_PAPER,
        base="required",
        models=(2, 2),
        parameters=(
            Parameter("rate", "float", "shared", REQUIRED, "length of a step, before the division", 0.0),
            Parameter("tau", "float", "shared", 1e-3, "addend to the root: smallest size of a relevant change", 1e-9),
        ),
        steps=map_only(_adam),
        costs=Costs(map=0.8),
        traits=Traits(first_state=0),
    ),
)

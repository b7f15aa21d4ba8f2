"""Implement the server step of federated Adam (FedAdam) and the moving averages that it needs.

Each is an elementwise merge of its own. FedAdam treats the change that the clients made together in a round,
``d = x - b``, as a gradient:

    m' = beta1 m + (1 - beta1) d            ``moving_mean``, keep beta1
    v' = beta2 v + (1 - beta2) d²           ``moving_squares``, keep beta2
    out = b + rate * m' / (sqrt(v') + tau)  ``adam``

There is no bias correction for the first rounds, in which both averages are small. Instead, ``tau`` sets the size of
changes below which a step is proportional to them. ``m`` and ``v`` are not models but have the shape of one. The first
round starts from zero. Both are stored in float32, regardless of the dtype of the models.

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
    Steps,
    StoredBlock,
    TensorTask,
    Traits,
)

if TYPE_CHECKING:
    import torch

_PAPER = "Adaptive federated optimization (FedAdam), Reddi et al. 2020, https://arxiv.org/abs/2003.00295"


def _moving(task: TensorTask, *, squared: bool) -> Map:
    """Return the map ``keep * second model + (1 - keep) * d``, or the same with ``d²``.

    A missing second model counts as zero.
    """
    keep, has_average = float(task.shared["keep"]), len(task.per_input) > 2

    def of(block: Block) -> torch.Tensor:
        change = block.inputs[1] - block.base
        new = (change * change if squared else change) * (1.0 - keep)
        return block.inputs[2] * keep + new if has_average else new

    def fused(block: StoredBlock, out: Any) -> None:
        from mergegate.merge_core.methods import kernels

        share = np.float32(1.0 - keep)
        kernels.moving_average(block.data, block.rows, block.length, np.float32(keep), share, squared, out)

    return Map(of, fused)


def _moving_mean(task: TensorTask) -> Steps:
    return _moving(task, squared=False)
    yield  # A generator without a fold.


def _moving_squares(task: TensorTask) -> Steps:
    return _moving(task, squared=True)
    yield  # A generator without a fold.


def _adam(task: TensorTask) -> Steps:
    """Add ``rate m / (sqrt(v) + tau)`` to the base.

    Negative values in ``v`` count as zero. A mean of squares has none.
    """
    rate, tau = float(task.shared["rate"]), float(task.shared["tau"])

    def of(block: Block) -> torch.Tensor:
        size = block.inputs[2].clamp(min=0.0).sqrt() + tau
        return block.base + block.inputs[1] * rate / size

    def fused(block: StoredBlock, out: Any) -> None:
        from mergegate.merge_core.methods import kernels

        kernels.adam(block.data, block.rows, block.length, np.float32(rate), np.float32(tau), out)

    return Map(of, fused)
    yield  # A generator without a fold.


def _keep(default: float) -> Parameter:
    return Parameter("keep", "float", "shared", default, "how much of the mean over the rounds before stays", 0.0, 1.0)


METHODS = (
    Method(
        name="moving_mean",
        summary="The mean over rounds of what a model changed; the second model is that of the rounds before",
        paper=_PAPER,
        base="required",
        models=(1, 2),
        parameters=(_keep(0.9),),
        steps=_moving_mean,
        costs=Costs(map=0.6),
        traits=Traits(may_zero=True, states_from=1, makes_state=True),
    ),
    Method(
        name="moving_squares",
        summary="The mean over rounds of the square of what a model changed; the second model is that of those before",
        paper=_PAPER,
        base="required",
        models=(1, 2),
        parameters=(_keep(0.99),),
        steps=_moving_squares,
        costs=Costs(map=0.6),
        traits=Traits(may_zero=True, states_from=1, makes_state=True),
    ),
    Method(
        name="adam",
        summary="The base plus a step by Adam: along a moving mean of changes, over the root of that of their squares",
        paper=_PAPER,
        base="required",
        models=(2, 2),
        parameters=(
            Parameter("rate", "float", "shared", REQUIRED, "how far a step goes, before it is divided", 0.0),
            Parameter("tau", "float", "shared", 1e-3, "added to the root: least size of changes that counts", 1e-9),
        ),
        steps=_adam,
        costs=Costs(map=0.8),
        traits=Traits(states_from=0),
    ),
)

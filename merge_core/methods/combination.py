"""Compute linear combinations of the inputs, and the Gram matrix that determines most coefficients.

The Gram matrix holds everything that an average on a sphere needs to know about its inputs: norms, cosines and
projections. So one fold pass over the blocks is enough, and the coefficients follow in float64 from a few numbers, no
matter how large the tensor is. This module has the building blocks and the simplest methods; :mod:`.spherical` and
:mod:`.model_stock` build on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.contract import (
    REQUIRED,
    Block,
    Costs,
    Fold,
    Map,
    Method,
    Parameter,
    Steps,
    StoredBlock,
    TensorTask,
    Traits,
    Values,
    fold_sums,
)

if TYPE_CHECKING:
    import torch


def combine(coefficients: Sequence[float], *, about_base: bool = False) -> Map:
    """Return the map ``sum c_i x_i``, or ``b + sum c_i (x_i - b)`` if ``about_base`` is set.

    With ``about_base``, input 0 is the base ``b`` and has no coefficient.
    """

    def of(block: Block) -> torch.Tensor:
        vectors = block.deltas() if about_base else block.inputs
        result = vectors[0] * coefficients[0]
        for vector, coefficient in zip(vectors[1:], coefficients[1:], strict=True):
            result = result + vector * coefficient
        return block.base + result if about_base else result

    def fused(block: StoredBlock, out: Any) -> None:
        from mergegate.merge_core.methods import kernels

        kernels.combine(block.data, block.rows, block.length, np.asarray(coefficients, np.float32), about_base, out)

    return Map(of, fused)


def mean_of_models(task: TensorTask) -> Map:
    """Return the map ``sum w_i x_i / sum w_i`` over the models.

    If there is a base, ``lambda`` scales the difference between the mean and the base.
    """
    weights = task.column("weight")
    scale = float(task.shared["lambda"]) / sum(weights)
    return combine([weight * scale for weight in weights], about_base=task.has_base)


def check_mean(shared: Values, per_input: Sequence[Values], where: str) -> None:
    """Raise InvalidInput if all weights of a mean are zero, or if ``lambda`` scales it without a base."""
    weights = [values["weight"] for values in per_input if "weight" in values]
    if sum(weights) <= 0:
        raise InvalidInput(where, found="weights that add up to 0", expected="a model that counts", remedy="raise one")
    if len(weights) == len(per_input) and shared["lambda"] != 1:
        raise InvalidInput(
            f"{where}: lambda",
            found=f"{shared['lambda']:g} without a base",
            expected="1: it is the factor of what is added to a base",
            remedy="name the base_model, or leave lambda out",
        )


def gram(count: int, *, about_base: bool = False) -> Fold:
    """Return a pass that computes the float64 Gram matrix ``[count, count]`` of the inputs or of their task vectors."""
    pairs = [(i, j) for i in range(count) for j in range(i, count)]

    def of(block: Block) -> torch.Tensor:
        import torch

        vectors = (block.deltas() if about_base else block.inputs).double()
        return torch.stack([block.grain_sums(vectors[i] * vectors[j]) for i, j in pairs], dim=-1)

    def fused(block: StoredBlock) -> Any:
        from mergegate.merge_core.methods import kernels

        return kernels.gram(block.data, block.rows, block.length, block.grain, about_base)

    upper = fold_sums(of, fused)

    def full(parts: Sequence[Any]) -> Any:
        matrix = np.zeros((count, count))
        for (i, j), value in zip(pairs, upper.combine(parts), strict=True):
            matrix[i, j] = matrix[j, i] = value
        return matrix

    return Fold(upper.of, full, upper.fused)


def _linear(task: TensorTask) -> Steps:
    weights = task.column("weight")
    scale = sum(weights) if task.shared["normalize"] else 1.0
    return combine([weight / scale for weight in weights])
    yield  # A generator without a fold.


def _check_weights(shared: Values, per_input: Sequence[Values], where: str) -> None:
    if shared["normalize"] and abs(sum(values["weight"] for values in per_input)) < 1e-12:
        raise InvalidInput(
            where,
            found="weights that add up to 0",
            expected="a sum that can be normalised",
            remedy="set normalize: false, or change a weight",
        )


def _passthrough(task: TensorTask) -> Steps:
    return combine([float(task.per_input[0]["scale"])])
    yield  # A generator without a fold.


PASSTHROUGH = Method(
    name="passthrough",
    summary="The tensors of one model, for stacking slices; optionally scaled",
    paper="",
    base="ordinary",
    models=(1, 1),
    parameters=(Parameter("scale", "float", "input", 1.0, "factor for every element"),),
    steps=_passthrough,
    costs=Costs(map=0.5),
    traits=Traits(may_zero=True),
)

METHODS = (
    Method(
        name="linear",
        summary="Weighted average of the models",
        paper="Model soups, Wortsman et al. 2022, https://arxiv.org/abs/2203.05482",
        base="ordinary",
        models=(1, None),
        parameters=(
            Parameter("weight", "float", "input", REQUIRED, "share of each model"),
            Parameter("normalize", "bool", "shared", True, "divide by the sum of the weights"),
        ),
        steps=_linear,
        check=_check_weights,
        costs=Costs(map=0.6),
        traits=Traits(adds_up=True, adapters="sum", first_draft="averages the models"),
    ),
    PASSTHROUGH,
)

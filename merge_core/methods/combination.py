"""Implement ``linear`` and ``passthrough``, and compute linear combinations and Gram matrices for other methods.

Norms, cosines and projections of the inputs follow from their Gram matrix. So a method that needs them computes the
matrix in one fold pass, and then a few coefficients in float64, regardless of the size of the tensor. See
:mod:`.spherical` and :mod:`.model_stock`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    StoredBlock,
    TensorTask,
    Traits,
    Values,
    fold_sums,
    load_kernels,
    map_only,
)

if TYPE_CHECKING:
    import torch


def combine(coefficients: Sequence[float], *, about_base: bool = False) -> Map:
    """Return the map ``sum c_i x_i`` of the inputs ``x_i``.

    With ``about_base``, it is ``b + sum c_i (x_i - b)``. Input 0 is then the base ``b`` and has no coefficient.
    """

    def map_block(block: Block) -> torch.Tensor:
        vectors = block.deltas() if about_base else block.inputs
        result = vectors[0] * coefficients[0]
        for vector, coefficient in zip(vectors[1:], coefficients[1:], strict=True):
            result = result + vector * coefficient
        return block.base + result if about_base else result

    def map_stored(block: StoredBlock, out: Any) -> None:
        factors = np.asarray(coefficients, np.float32)
        load_kernels().combine(block.data, block.rows, block.length, factors, about_base, out)

    return Map(map_block, map_stored)


def mean_of_models(task: TensorTask) -> Map:
    """Return the map to the weighted mean of the models, ``sum w_i x_i / sum w_i``.

    If there is a base, ``lambda`` scales the difference between the mean and the base.
    """
    weights = task.model_values("weight")
    scale = float(task.shared["lambda"]) / sum(weights)
    return combine([weight * scale for weight in weights], about_base=task.has_base)


def check_mean(shared_values: Values, per_input: Sequence[Values], location: str) -> None:
    """Raise InvalidInput if the weights of a mean have no positive sum, or if ``lambda`` is set without a base."""
    weights = [values["weight"] for values in per_input if "weight" in values]
    if sum(weights) <= 0:
        raise InvalidInput(
            location, found="weights that add up to 0", expected="a positive sum", remedy="increase a weight"
        )
    if len(weights) == len(per_input) and shared_values["lambda"] != 1:
        raise InvalidInput(
            f"{location}: lambda",
            found=f"{shared_values['lambda']:g} without a base",
            expected="1, because lambda scales the difference from a base",
            remedy="set base_model, or remove lambda",
        )


def gram(count: int, *, about_base: bool = False) -> Fold:
    """Return a pass that computes the float64 Gram matrix ``[count, count]`` of the inputs, or of the task vectors."""
    pairs = [(i, j) for i in range(count) for j in range(i, count)]

    def reduce_block(block: Block) -> torch.Tensor:
        import torch

        vectors = (block.deltas() if about_base else block.inputs).double()
        return torch.stack([block.grain_sums(vectors[i] * vectors[j]) for i, j in pairs], dim=-1)

    upper = fold_sums(
        reduce_block, lambda block: load_kernels().gram(block.data, block.rows, block.length, block.grain, about_base)
    )

    def combine_parts(parts: Sequence[Any]) -> Any:
        matrix = np.zeros((count, count))
        for (i, j), value in zip(pairs, upper.combine(parts), strict=True):
            matrix[i, j] = matrix[j, i] = value
        return matrix

    return Fold(upper.reduce_block, combine_parts, upper.reduce_stored)


def _linear(task: TensorTask) -> Map:
    weights = task.model_values("weight")
    scale = sum(weights) if task.shared["normalize"] else 1.0
    return combine([weight / scale for weight in weights])


def check_weight_sum(switch: str) -> Callable[[Values, Sequence[Values], str], None]:
    """Return a check for :class:`.Method`: the weights must not add up to 0 if parameter ``switch`` is true."""

    def check(shared_values: Values, per_input: Sequence[Values], location: str) -> None:
        if shared_values[switch] and abs(sum(values["weight"] for values in per_input if "weight" in values)) < 1e-12:
            raise InvalidInput(
                location,
                found="weights that add up to 0",
                expected="a sum other than 0 to divide by",
                remedy=f"change a weight, or set {switch}: false",
            )

    return check


PASSTHROUGH = Method(
    name="passthrough",
    formula="x = scale · x_1",
    summary="The tensors of one model, optionally scaled, for stacking slices",
    paper="",
    base="ordinary",
    models=(1, 1),
    parameters=(Parameter("scale", "float", "input", 1.0, "factor for every element"),),
    steps=map_only(lambda task: combine([float(task.per_input[0]["scale"])])),
    costs=Costs(map=0.5),
    traits=Traits(may_zero=True),
)

LINEAR = Method(
    name="linear",
    formula="x = Σ w_i x_i / Σ w_i",
    summary="Weighted average of the models",
    paper="Model soups, Wortsman et al. 2022, https://arxiv.org/abs/2203.05482",
    base="ordinary",
    models=(1, None),
    parameters=(
        Parameter("weight", "float", "input", REQUIRED, "weight of each model"),
        Parameter("normalize", "bool", "shared", True, "divide by the sum of the weights"),
    ),
    steps=map_only(_linear),
    check=check_weight_sum("normalize"),
    costs=Costs(map=0.6),
    traits=Traits(adds_up=True, adapters="sum", first_draft="averages the models"),
)

METHODS = (LINEAR, PASSTHROUGH)

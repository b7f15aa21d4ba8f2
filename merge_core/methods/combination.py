"""Average the models: linear, passthrough, Fisher merging and upcycling; linear combinations and Gram matrices.

Norms, cosines and projections of the inputs follow from their Gram matrix. So a method that needs them computes the
matrix in one fold pass, and then a few coefficients in float64, regardless of the size of the tensor. See
:mod:`.spherical`.

``fisher`` averages each element, weighted by its importance to each model. ``F_i`` is the diagonal of the Fisher
information of model i, measured on a calibration text for that model. Then ``x = sum w_i F_i x_i / sum w_i F_i`` is the
most likely point if each model's posterior is a Gaussian around its weights with the precision ``F_i`` (Matena & Raffel
2022, https://arxiv.org/abs/2111.09832). It is computed as ``m + sum w_i F_i (x_i - m) / sum w_i F_i`` around the mean
``m``, so that an element without importance to any model becomes the mean. There is no lower bound for ``F_i``.

``mixture`` creates the weights of an expert from those of a dense model. It adds noise, so that copies can diverge, and
scales them. A recipe cannot select this method: :mod:`merge_core.plan` assigns it to the tensors of a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

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
    add_in_order,
    fold_sums,
    map_only,
    torch,
)
from mergegate.merge_core.methods.masks import mask_words

# Parameters of several methods.
WEIGHT = Parameter("weight", "float", "non_base", REQUIRED, "factor of each task vector")
LAMBDA = Parameter("lambda", "float", "shared", 1.0, "factor of the merged task vector")

# Constant that turns a key into another key, for a second stream of random words.
_SECOND_STREAM = 0x5BD1E995
_WORDS = 2.0**32


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
        block.run("combine", np.asarray(coefficients, np.float32), about_base, out)

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
        vectors = (block.deltas() if about_base else block.inputs).double()
        return torch.stack([block.grain_sums(vectors[i] * vectors[j]) for i, j in pairs], dim=-1)

    upper = fold_sums(reduce_block, lambda block: block.run("gram", block.grain, about_base))

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


def _average_by_importance(task: TensorTask) -> Map:
    """Return the map to the weighted mean, or to the plain mean if importance was not measured."""
    if not task.has_importance:
        return mean_of_models(task)
    weights, scale = task.model_values("weight"), float(task.shared["lambda"])
    shares = [weight / sum(weights) for weight in weights]

    def map_block(block: Block) -> torch.Tensor:
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


def _upcycle(task: TensorTask) -> Map:
    """Return the map ``(x + noise * z) * scale``, with ``z`` uniform between -1 and 1 or standard normal."""
    (values,), (key,) = task.per_input, task.seeds
    scale, noise = float(values["scale"]), float(values["noise"])
    if noise == 0:
        return combine([scale])

    def map_block(block: Block) -> torch.Tensor:
        numbers = block.inputs[0]
        if values["draw"] == "uniform":
            draws = (mask_words(key, block.start, len(numbers), numbers.device).double() + 0.5) * (2 / _WORDS) - 1
        else:
            # The transform of Box and Muller (1958). A draw depends only on the key and its index, so blocks of any
            # size get the same numbers.
            second_key = (key[0] ^ _SECOND_STREAM, key[1])
            radius = (mask_words(key, block.start, len(numbers), numbers.device).double() + 0.5) / _WORDS
            angle = (mask_words(second_key, block.start, len(numbers), numbers.device).double() + 0.5) / _WORDS
            draws = torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)
        return ((numbers.double() + noise * draws) * scale).to(numbers.dtype)

    return Map(map_block)


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

FISHER = Method(
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
)

UPCYCLING = Method(
    name="mixture",
    summary="Dense models as the experts of a mixture",
    paper="Sparse upcycling, Komatsuzaki et al. 2022, https://arxiv.org/abs/2212.05055",
    base="ordinary",
    models=(1, 1),
    parameters=(
        Parameter("scale", "float", "input", 1.0, "factor for every element"),
        Parameter("noise", "float", "input", 0.0, "size of the noise to add to every element", minimum=0.0),
        Parameter("draw", "choice", "input", "normal", "distribution of the noise", choices=("normal", "uniform")),
    ),
    steps=map_only(_upcycle),
    costs=Costs(map=0.5),
    traits=Traits(may_zero=True, merges_base=True),
)

METHODS = (LINEAR, PASSTHROUGH)

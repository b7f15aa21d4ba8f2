"""Merge element by element: RAM, Consensus Task Arithmetic, robust averages, NearSwap and Arcee Fusion.

With ``d_i = x_i - b``:

**RAM** averages the changes that several models made to an element, and keeps or amplifies a change that only one model
made. Model i changed an element if ``|d_i| > epsilon``. If ``c`` models changed it,
``out = b + sum_i d_i [changed_i] (L_i if c == 1 else 1 / c)``. Plain RAM has ``L_i = 1``. RAM+ amplifies the unique
changes of a model if the model shares many other changes: ``L_i = 1 + r * clip(shared_i / unique_i, 0, alpha)``.
Yuan et al. 2026, https://arxiv.org/abs/2601.13572.

**Consensus Task Arithmetic** adds up task vectors only in the elements that several models need. With
``v_i = w_i d_i`` and ``T = sum v_i``, model i needs an element if ``|v_i| > threshold * |T - v_i|``. An element that
fewer than ``agreement`` models need keeps the value of the base. Wang et al. 2024, https://arxiv.org/abs/2405.07813.

**Robust averages** limit the influence of a single model. For each element, they sort the values of the task vectors
and average the middle ones: ``out = b + lambda * mean(d_(k), ..., d_(n - 1 - k))``. The trimmed mean leaves out
``k = floor(trim * n)`` values on each side, and the median all but the middle one or two. So fewer than half of the
models cannot take over the result. But if each model has a skill of its own, the methods also drop what only a few
models have. Yin et al. 2018, https://arxiv.org/abs/1803.01498.

**The geometric median** is the point with the smallest sum of distances to all models. It is a mean of whole models,
and its weights follow from the Gram matrix of all task vectors, which is measured before the merge
(:func:`merge_core.analysis.geometric_median`). So it keeps what only a few models have, in proportion to their weight.

**NearSwap and Arcee Fusion** merge one model with a base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mergegate.merge_core.methods.combination import LAMBDA, WEIGHT, check_mean, combine
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
    add_in_order,
    fold_counts,
    fold_grains,
    map_only,
    row_length,
    torch,
)
from mergegate.merge_core.methods.selection import ScoreFunction, SelectionRequest, select, select_passes

_RAM = "RAM, Yuan et al. 2026, https://arxiv.org/abs/2601.13572"
_ROBUST = "Byzantine-robust distributed learning, Yin et al. 2018, https://arxiv.org/abs/1803.01498"
_TRIM = Parameter("trim", "float", "shared", 0.2, "share of the models to leave out on each side", 0.0, 0.49)
# Lower bound for the difference that the parameter ``t`` of NearSwap is divided by.
_NEAREST = 1e-6
_EPSILON = Parameter("epsilon", "float", "shared", 1e-5, "a smaller difference does not count as a change", minimum=0.0)


def _amplified(task: TensorTask) -> Steps:
    epsilon, r, alpha = (float(task.shared[name]) for name in ("epsilon", "r", "alpha"))

    def reduce_block(block: Block) -> torch.Tensor:
        changed = block.deltas().abs() > epsilon
        several = changed.sum(0) > 1
        return torch.stack(((changed & several).sum(-1), (changed & ~several).sum(-1)))

    shared, unique = yield fold_counts(reduce_block, lambda block: block.run("count_changes", np.float32(epsilon)))
    factors = [
        1 + r * min(max(shared_count / max(unique_count, epsilon), 0.0), alpha)
        if max(unique_count, epsilon) > 0
        else 1 + r * alpha
        for shared_count, unique_count in zip(shared.tolist(), unique.tolist(), strict=True)
    ]
    return _average_changes(factors, epsilon)


def _average_changes(factors: Sequence[float], epsilon: float) -> Map:
    """Return the map of RAM. ``factors`` are the factors ``L_i`` for the unique changes of each model."""

    def map_block(block: Block) -> torch.Tensor:
        deltas = block.deltas()
        changed = deltas.abs() > epsilon
        number = changed.sum(0)
        total = torch.zeros_like(block.base)
        for delta, is_changed, factor in zip(deltas, changed, factors, strict=True):
            scale = torch.where(number == 1, factor, 1 / number.clamp(min=1).to(delta.dtype))
            total = total + torch.where(is_changed, delta * scale, 0.0)
        return block.base + total

    def map_stored(block: StoredBlock, out: Any) -> None:
        block.run("ram", np.float32(epsilon), np.array(factors, np.float32), out)

    return Map(map_block, map_stored)


def _consensus(task: TensorTask) -> Map:
    weights, thresholds = task.model_values("weight"), task.model_values("threshold")
    agreement, scale = int(task.shared["agreement"]), float(task.shared["lambda"])

    def map_block(block: Block) -> torch.Tensor:
        weighted = [delta * weight for delta, weight in zip(block.deltas(), weights, strict=True)]
        total = add_in_order(weighted)
        needed = torch.zeros(total.shape, dtype=torch.int32, device=total.device)
        for vector, threshold in zip(weighted, thresholds, strict=True):
            needed += vector.abs() > (total - vector).abs() * threshold
        return block.base + torch.where(needed >= agreement, total, 0.0) * scale

    def map_stored(block: StoredBlock, out: Any) -> None:
        arguments = (np.asarray(weights, np.float32), np.asarray(thresholds, np.float32), agreement, np.float32(scale))
        block.run("consensus", *arguments, out)

    return Map(map_block, map_stored)


def _average_middle(trim_count: int, scale: float) -> Map:
    """Return the map of a robust average, which leaves out the ``trim_count`` lowest and highest values."""

    def map_block(block: Block) -> torch.Tensor:
        ordered = block.deltas().sort(0).values
        middle = ordered[trim_count : len(ordered) - trim_count]
        return block.base + add_in_order(list(middle)) / len(middle) * scale

    def map_stored(block: StoredBlock, out: Any) -> None:
        block.run("trimmed_middle", trim_count, np.float32(scale), out)

    return Map(map_block, map_stored)


def _trimmed_mean(task: TensorTask) -> Map:
    # The small addend corrects floating-point rounding, so that a share of 0.2 of five models is one model.
    skipped = math.floor(float(task.shared["trim"]) * (len(task.per_input) - 1) + 1e-9)
    return _average_middle(skipped, float(task.shared["lambda"]))


def _weighted_mean(task: TensorTask) -> Map:
    weights, scale = task.model_values("weight"), float(task.shared["lambda"])
    return combine([weight / sum(weights) * scale for weight in weights], about_base=True)


def _nearswap(task: TensorTask) -> Map:
    """Move towards the model where it is near the base: ``w = clip(t / |b - x|, 0, 1)``, ``out = w x + (1 - w) b``."""
    t = float(task.shared["t"])

    def map_block(block: Block) -> torch.Tensor:
        base, model = block.base, block.inputs[1]
        share = (t / (base - model).abs().clamp(min=_NEAREST)).clamp(0.0, 1.0)
        return share * model + (1.0 - share) * base

    def map_stored(block: StoredBlock, out: Any) -> None:
        block.run("nearswap", np.float32(t), np.float32(_NEAREST), out)

    return Map(map_block, map_stored)


def _fusion(task: TensorTask) -> Steps:
    """Take the elements of the model whose importance is an outlier, and the other elements from the base.

    Importance is ``|x - b|`` times the divergence between the softmax of the two rows. An outlier is at least the
    median plus 1.5 times the interquartile range, and the quantiles are exact.
    """
    divergence = yield fold_grains(_divergence)

    def importance(block: Block) -> torch.Tensor:
        first = block.start // block.grain
        changes = (block.inputs[1] - block.base).abs().reshape(-1, block.grain)
        rows = torch.from_numpy(divergence[first : first + len(changes)]).to(changes)
        weighted: torch.Tensor = changes * rows[:, None]
        return weighted.flatten()

    def rows_of(block: StoredBlock) -> Any:
        first = block.start // block.grain
        return divergence[first : first + block.length // block.grain].astype(np.float32)

    ranks = [task.numel - math.floor(share * (task.numel - 1)) for share in (0.25, 0.5, 0.75)]
    scores = ScoreFunction(
        lambda block: importance(block).unsqueeze(0),
        task.dtype,
        lambda block: block.run("importances", block.grain, rows_of(block)),
    )
    thresholds = yield from select(scores, [SelectionRequest(0, rank, numbered=False) for rank in ranks], task.numel)
    # The key of a threshold has the bits of the score.
    key_type = np.int32 if task.dtype == "float32" else np.int64
    low, median, high = (float(np.array(threshold.key, key_type).view(task.dtype)) for threshold in thresholds)
    bound = median + 1.5 * (high - low)

    def map_block(block: Block) -> Any:
        return torch.where(importance(block) >= bound, block.inputs[1], block.base)

    def map_stored(block: StoredBlock, out: Any) -> None:
        block.run("fuse", block.grain, rows_of(block), np.float32(bound), out)

    return Map(map_block, map_stored)


def _divergence(block: Block) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of each row from the base: ``[rows]`` float64, never negative."""
    # Work in place: allocating memory for each step would cost more than some of the steps.
    base, model = (torch.softmax(row.double(), -1).add_(1e-8) for row in block.grains(block.inputs))
    return torch.div(model, base, out=base).log_().mul_(model).sum(-1).clamp_(min=0.0)


METHODS = (
    Method(
        name="consensus_ta",
        formula="v_i = w_i (x_i - b), T = Σ v_i; x = b + λ T where at least agreement models have |v_i| > "
        "threshold · |T - v_i|, else b",
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
    Method(
        name="geometric_median",
        formula="x = b + λ · argmin_z Σ w_i |x_i - b - z|",
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
        formula="x = b + λ · median(x_i - b)",
        summary="The base plus the median of the task vectors, element by element",
        paper=_ROBUST,
        base="required",
        models=(1, None),
        parameters=(LAMBDA,),
        steps=map_only(lambda task: _average_middle((len(task.per_input) - 2) // 2, float(task.shared["lambda"]))),
        costs=Costs(map=0.9),
        traits=Traits(adapters="products"),
    ),
    Method(
        name="trimmed_mean",
        formula="x = b + λ · mean(x_i - b) without the floor(trim · n) lowest and highest values of each element",
        summary="The base plus the mean of the task vectors without the extremes of each element",
        paper=_ROBUST,
        base="required",
        models=(1, None),
        parameters=(_TRIM, LAMBDA),
        steps=map_only(_trimmed_mean),
        costs=Costs(map=0.9),
        traits=Traits(adapters="products"),
    ),
    Method(
        name="ram",
        summary="Average what several models changed, keep what only one changed",
        paper=_RAM,
        base="required",
        models=(1, None),
        parameters=(_EPSILON,),
        steps=map_only(lambda task: _average_changes([1.0] * (len(task.per_input) - 1), float(task.shared["epsilon"]))),
        costs=Costs(map=1.4),
    ),
    Method(
        name="ramplus_tl",
        summary="RAM that amplifies what only one model changed, per tensor",
        paper=_RAM,
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

WITH_ONE_MODEL = (
    Method(
        name="nearswap",
        summary="Move the base to the values of the model where both are near",
        paper="",
        base="required",
        models=(1, 1),
        parameters=(Parameter("t", "float", "shared", REQUIRED, "difference up to which the model's value is used"),),
        steps=map_only(_nearswap),
        single_input="copy",
        costs=Costs(map=0.5),
        traits=Traits(merges_base=True),
    ),
    Method(
        name="arcee_fusion",
        summary="Take from the model the elements whose change is an outlier in importance",
        paper="Arcee Fusion, https://www.arcee.ai/blog/meet-mergekit-v0-1",
        base="required",
        models=(1, 1),
        parameters=(),
        steps=_fusion,
        grain=row_length,
        single_input="copy",
        costs=Costs(map=0.4, fold=5.2, folds=lambda task: 1 + select_passes(task.dtype, task.numel, numbered=False)),
        traits=Traits(merges_base=True),
    ),
)

"""Implement the methods that merge one model with a base: NearSwap and Arcee Fusion."""

from __future__ import annotations

import math
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
    fold_grains,
    load_kernels,
    map_only,
    row_length,
)
from mergegate.merge_core.methods.scores import ScoreFunction, SelectionRequest, count_stored_scores
from mergegate.merge_core.methods.selection import select, select_passes

if TYPE_CHECKING:
    import torch

# Lower bound for the difference that ``t`` is divided by.
_NEAREST = 1e-6


def _nearswap(task: TensorTask) -> Map:
    """Move towards the model where it is near the base: ``w = clip(t / |b - x|, 0, 1)``, ``out = w x + (1 - w) b``."""
    t = float(task.shared["t"])

    def map_block(block: Block) -> torch.Tensor:
        base, model = block.base, block.inputs[1]
        share = (t / (base - model).abs().clamp(min=_NEAREST)).clamp(0.0, 1.0)
        return share * model + (1.0 - share) * base

    def map_stored(block: StoredBlock, out: Any) -> None:
        load_kernels().nearswap(block.data, block.rows, block.length, np.float32(t), np.float32(_NEAREST), out)

    return Map(map_block, map_stored)


def _fusion(task: TensorTask) -> Steps:
    """Take the elements of the model whose importance is an outlier, and the other elements from the base.

    Importance is ``|x - b|`` times the divergence between the softmax of the two rows. An outlier is at least the
    median plus 1.5 times the interquartile range, and the quantiles are exact.
    """
    divergence = yield fold_grains(_divergence)

    def importance(block: Block) -> torch.Tensor:
        import torch

        first = block.start // block.grain
        changes = (block.inputs[1] - block.base).abs().reshape(-1, block.grain)
        rows = torch.from_numpy(divergence[first : first + len(changes)]).to(changes)
        weighted: torch.Tensor = changes * rows[:, None]
        return weighted.flatten()

    def rows_of(block: StoredBlock) -> Any:
        first = block.start // block.grain
        return divergence[first : first + block.length // block.grain].astype(np.float32)

    ranks = [task.numel - math.floor(share * (task.numel - 1)) for share in (0.25, 0.5, 0.75)]
    stored_scores = count_stored_scores(
        lambda block: load_kernels().importances(block.data, block.rows, block.length, block.grain, rows_of(block))
    )
    scores = ScoreFunction(lambda block: importance(block).unsqueeze(0), task.dtype, stored_scores)
    thresholds = yield from select(scores, [SelectionRequest(0, rank, numbered=False) for rank in ranks], task.numel)
    # The key of a threshold has the bits of the score.
    key_type = np.int32 if task.dtype == "float32" else np.int64
    low, median, high = (float(np.array(threshold.key, key_type).view(task.dtype)) for threshold in thresholds)
    bound = median + 1.5 * (high - low)

    def map_block(block: Block) -> Any:
        import torch

        return torch.where(importance(block) >= bound, block.inputs[1], block.base)

    def map_stored(block: StoredBlock, out: Any) -> None:
        arguments = (block.grain, rows_of(block), np.float32(bound))
        load_kernels().fuse(block.data, block.rows, block.length, *arguments, out)

    return Map(map_block, map_stored)


def _divergence(block: Block) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of each row from the base: ``[rows]`` float64, never negative."""
    import torch

    # Work in place: allocating memory for each step would cost more than some of the steps.
    base, model = (torch.softmax(row.double(), -1).add_(1e-8) for row in block.grains(block.inputs))
    return torch.div(model, base, out=base).log_().mul_(model).sum(-1).clamp_(min=0.0)


METHODS = (
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

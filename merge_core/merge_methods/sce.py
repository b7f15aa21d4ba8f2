"""SCE: select the elements that vary most between models, calculate a weight per tensor, erase minority signs.

Wan et al. 2024, https://arxiv.org/abs/2408.07990. ``D_i = x_i - b``; kept are the positions of highest variance over
the models; ``c_i`` is a model's share of the mean squares; only ``D_i`` of the majority sign count:
``out = b + sum c_i D_i E_i / max(sum c_i E_i, 1e-6)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merge_core.merge_methods.contract import Block, Map, Method, Parameter, Steps, TensorTask, counts, sums
from merge_core.merge_methods.selection import Cut, Request, Scores, bits, select, taken

if TYPE_CHECKING:
    import torch

# Mean squares that add up to less give no shares: all models count alike. The peer's bound, absolute as it is.
_NO_SHARES = 1e-6
_LEAST_DIVISOR = 1e-6


def _steps(task: TensorTask) -> Steps:
    share = float(task.shared["select_topk"])
    cut: Cut | None = None
    empty = False
    if share < 1:
        varying = yield counts(lambda block: (_variance(block) > 0).sum().reshape(1))
        k = int(int(varying[0]) * share)
        empty = k <= 0
        if not empty:
            (cut,) = yield from select(Scores(lambda block: _variance(block).unsqueeze(0), task.dtype), [Request(0, k)])
    if empty:
        return Map(lambda block: block.base)

    def selected(block: Block) -> torch.Tensor:
        import torch

        deltas = block.deltas()
        return deltas if cut is None else torch.where(taken(cut, bits(_variance(block)), block), deltas, 0.0)

    squares = yield sums(lambda block: block.grain_sums(selected(block).double() ** 2))
    means = [float(value) / task.numel for value in squares]
    total = sum(means)
    weights = [mean / total if total >= _NO_SHARES else 1 / len(means) for mean in means]

    def of(block: Block) -> torch.Tensor:
        import torch

        deltas = selected(block)
        votes, merged, divisor = deltas[0], torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
        for delta in deltas[1:]:
            votes = votes + delta
        positive = votes >= 0
        for delta, weight in zip(deltas, weights, strict=True):
            agrees = torch.where(positive, delta > 0, delta < 0)
            merged = merged + torch.where(agrees, delta * weight, 0.0)
            divisor = divisor + agrees * weight
        return block.base + merged / divisor.clamp(min=_LEAST_DIVISOR)

    return Map(of)


def _variance(block: Block) -> torch.Tensor:
    """Population variance of the task vectors at each position: ``[elements]``."""
    deltas = block.deltas()
    mean = deltas[0]
    for delta in deltas[1:]:
        mean = mean + delta
    mean = mean / len(deltas)
    total = (deltas[0] - mean) ** 2
    for delta in deltas[1:]:
        total = total + (delta - mean) ** 2
    return total / len(deltas)


METHODS = (
    Method(
        name="sce",
        summary="Keep what varies most between models, weigh models by their energy, erase minority signs",
        paper="SCE (FuseChat), Wan et al. 2024, https://arxiv.org/abs/2408.07990",
        base="required",
        models=(1, None),
        parameters=(
            Parameter("select_topk", "float", "shared", 1.0, "share of the varying elements that is kept", 0.0, 1.0),
            Parameter("int8_mask", "bool", "shared", False, "accepted for compatibility, has no effect"),
        ),
        steps=_steps,
    ),
)

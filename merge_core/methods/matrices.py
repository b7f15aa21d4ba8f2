"""What methods on whole matrices have in common: runs of rows, and sums over all of them.

Of a matrix ``[out, in]`` such a method needs a product over its rows, works something out from that (:class:`.Solve`),
and then maps rows, each by itself. Rows come in runs of ``GRAIN_ROWS``, whatever the blocks: products of runs of
another length would add up in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mergegate.merge_core.methods.contract import GRAIN, Block, Fold, TensorTask, Values, row_length

if TYPE_CHECKING:
    import torch

GRAIN_ROWS = 128


def grain_of_rows(shape: tuple[int, ...], shared: Values) -> int:
    """Grain of a method on matrices: a run of rows; of what is no matrix, as of other methods."""
    return GRAIN_ROWS * row_length(shape, shared) if len(shape) == 2 else GRAIN


def rows_of(block: Block, width: int) -> Iterator[torch.Tensor]:
    """``[inputs, elements]`` → runs of rows ``[inputs, rows, in]``."""
    import torch

    yield from torch.split(block.inputs.reshape(len(block.inputs), -1, width), GRAIN_ROWS, dim=1)


def deltas_of(part: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Rows of all inputs, the base first → weighted task vectors in float64 ``[models, rows, in]``."""
    import torch

    wide = part.double()
    return torch.stack([(own - wide[0]) * weight for own, weight in zip(wide[1:], weights, strict=True)])


class DeltaProducts:
    """Products ``d_i' d_j`` ``[in, in]`` of the task vectors of a matrix, summed over its rows in float64.

    Args:
        task: The matrix; its base is input 0.
        crossed: Of every two models (i <= j); else only of each with itself.
        weighted: Whether task vectors are multiplied with the weights of their models.
    """

    def __init__(self, task: TensorTask, *, crossed: bool, weighted: bool = True) -> None:
        own = task.column("weight")
        self._width, self._weights = task.shape[-1], own if weighted else [1.0] * len(own)
        models = range(len(self._weights))
        self._pairs = [(i, j) for i in models for j in models if i == j or (crossed and i < j)]
        self._sums: dict[tuple[int, int], torch.Tensor] = {}

    def fold(self) -> Fold:
        """The pass that adds them up."""
        return Fold(self._add, lambda parts: parts[-1], in_order=True)

    def _add(self, block: Block) -> torch.Tensor:
        import torch

        for part in rows_of(block, self._width):
            deltas = deltas_of(part, self._weights)
            for i, j in self._pairs:
                if (i, j) not in self._sums:
                    self._sums[i, j] = deltas[i].T @ deltas[j]
                else:
                    self._sums[i, j].addmm_(deltas[i].T, deltas[j])
        return torch.zeros(0)

    def taken(self) -> dict[tuple[int, int], torch.Tensor]:
        """The sums by pair of models; nothing is held here any more."""
        sums, self._sums = self._sums, {}
        return sums


class WholeDeltas:
    """The task vectors of a matrix, held whole, where products of its columns would be too large: float32.

    Args:
        task: The matrix; its base is input 0.
        weighted: Whether they are multiplied with the weights of their models.
    """

    def __init__(self, task: TensorTask, *, weighted: bool = True) -> None:
        own = task.column("weight")
        self._shape, self._weights = task.shape, own if weighted else [1.0] * len(own)
        self._whole: torch.Tensor | None = None

    def fold(self) -> Fold:
        """The pass that collects them."""
        return Fold(self._collect, lambda parts: parts[-1], in_order=True)

    def _collect(self, block: Block) -> torch.Tensor:
        import torch

        if self._whole is None:
            shape = (len(self._weights), *self._shape)
            self._whole = torch.empty(shape, dtype=block.inputs.dtype, device=block.inputs.device)
        row = block.start // self._shape[-1]
        for part in rows_of(block, self._shape[-1]):
            self._whole[:, row : row + part.shape[1]] = deltas_of(part, self._weights).to(part.dtype)
            row += part.shape[1]
        return torch.zeros(0)

    def taken(self) -> torch.Tensor:
        """``[models, out, in]``; nothing is held here any more."""
        assert self._whole is not None
        whole, self._whole = self._whole, None
        return whole

"""Share code between the methods on whole matrices: iterate over runs of rows, and add up products over all rows.

For a matrix ``[out, in]``, such a method adds up a product over its rows, computes something from it (:class:`.Solve`),
and then maps each row on its own. Rows always come in runs of ``GRAIN_ROWS``, regardless of the block size, because
products over runs of another length would add up in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mergegate.merge_core.methods.contract import GRAIN, Block, Fold, TensorTask, Values, row_length

if TYPE_CHECKING:
    import torch

GRAIN_ROWS = 128


def grain_of_rows(shape: tuple[int, ...], shared: Values) -> int:
    """Return the grain of a method on matrices: a run of rows. A tensor that is not a matrix has the default grain."""
    return GRAIN_ROWS * row_length(shape, shared) if len(shape) == 2 else GRAIN


def rows_of(block: Block, width: int) -> Iterator[torch.Tensor]:
    """Split a block's ``[inputs, elements]`` into runs of rows ``[inputs, rows, in]``."""
    import torch

    yield from torch.split(block.inputs.reshape(len(block.inputs), -1, width), GRAIN_ROWS, dim=1)


def deltas_of(part: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return weighted task vectors in float64, ``[models, rows, in]``, from rows of all inputs, the base first."""
    import torch

    wide = part.double()
    return torch.stack([(row - wide[0]) * weight for row, weight in zip(wide[1:], weights, strict=True)])


class DeltaProducts:
    """Products ``d_i' d_j`` ``[in, in]`` of the task vectors of a matrix, summed over its rows in float64.

    Args:
        task: The matrix. Its base is input 0.
        crossed: Whether to compute the products of all pairs of models (i <= j) instead of each model with itself.
        weighted: Whether to multiply task vectors by the weights of their models.
    """

    def __init__(self, task: TensorTask, *, crossed: bool, weighted: bool = True) -> None:
        weights = task.column("weight")
        self._width, self._weights = task.shape[-1], weights if weighted else [1.0] * len(weights)
        models = range(len(self._weights))
        self._pairs = [(i, j) for i in models for j in models if i == j or (crossed and i < j)]
        self._sums: dict[tuple[int, int], torch.Tensor] = {}

    def fold(self) -> Fold:
        """Return the pass that adds up the products."""
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

    def release(self) -> dict[tuple[int, int], torch.Tensor]:
        """Return the sums by pair of models, and release them here."""
        sums, self._sums = self._sums, {}
        return sums


class WholeDeltas:
    """The task vectors of a matrix, held whole in memory because products of its columns would be too large: float32.

    Args:
        task: The matrix. Its base is input 0.
        weighted: Whether to multiply task vectors by the weights of their models.
    """

    def __init__(self, task: TensorTask, *, weighted: bool = True) -> None:
        weights = task.column("weight")
        self._shape, self._weights = task.shape, weights if weighted else [1.0] * len(weights)
        self._whole: torch.Tensor | None = None

    def fold(self) -> Fold:
        """Return the pass that collects the task vectors."""
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

    def release(self) -> torch.Tensor:
        """Return the task vectors ``[models, out, in]``, and release them here."""
        assert self._whole is not None
        whole, self._whole = self._whole, None
        return whole

"""Provide functions for methods on whole matrices ``[out, in]``: iterate over runs of rows, and sum products over rows.

Runs always have ``GRAIN_ROWS`` rows, regardless of the block size, so that products are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mergegate.merge_core.methods.contract import GRAIN, Block, Costs, Fold, TensorTask, Values, row_length, torch

if TYPE_CHECKING:
    # Products of two task matrices, by pair of models i <= j.
    Products: TypeAlias = dict[tuple[int, int], torch.Tensor]

GRAIN_ROWS = 128
# Share of the squares of a task matrix up to which its deviations from the mean of its rows count as rounding errors.
_CONSTANT = 1e-6


def grain_of_rows(shape: tuple[int, ...], shared_values: Values) -> int:
    """Return the grain for methods on matrices: a run of rows, or the default grain for other tensors."""
    return GRAIN_ROWS * row_length(shape, shared_values) if len(shape) == 2 else GRAIN


def costs_of_matrices(products: Callable[[TensorTask], float], held_bytes: Callable[[TensorTask], int]) -> Costs:
    """Return the costs of a method that reads the matrices of linear layers once, before the map.

    Other tensors need no products and no memory. The arguments are those of :class:`.Costs`.
    """
    return Costs(
        map=1.5,
        fold=1.5,
        folds=lambda task: int(task.is_projection),
        products=lambda task: products(task) if task.is_projection else 0.0,
        held_bytes=lambda task: held_bytes(task) if task.is_projection else 0,
    )


def rows_of(block: Block, width: int) -> Iterator[torch.Tensor]:
    """Split a block into runs of rows: ``[inputs, elements]`` → several ``[inputs, rows, in]``."""
    yield from torch.split(block.inputs.reshape(len(block.inputs), -1, width), GRAIN_ROWS, dim=1)


def deltas_of(part: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return weighted task vectors as float64 ``[models, rows, in]``. Input 0 of ``part`` is the base."""
    wide = part.double()
    return torch.stack([(row - wide[0]) * weight for row, weight in zip(wide[1:], weights, strict=True)])


def sum_delta_products(
    task: TensorTask, *, crossed: bool, weighted: bool = True, centered: bool = False
) -> Generator[Fold, Any, Products]:
    """Yield the pass that adds up the float64 products ``d_i' d_j`` ``[in, in]`` over all rows, and return the sums.

    With ``crossed``, there is a product for each pair of models (i <= j), else only one for each model with itself.
    With ``weighted``, task vectors are multiplied by the weights of their models. With ``centered``, the mean of the
    rows of each task matrix is subtracted from it first.
    """
    weights = _vector_weights(task, weighted)
    models = range(len(weights))
    pairs = [(i, j) for i in models for j in models if i == j or (crossed and i < j)]
    sums: Products = {}
    row_sums: list[torch.Tensor] = []

    def reduce_block(block: Block) -> torch.Tensor:
        for part in rows_of(block, task.shape[-1]):
            deltas = deltas_of(part, weights)
            if centered:
                row_sums[:] = [row_sums[0] + deltas.sum(1)] if row_sums else [deltas.sum(1)]
            for i, j in pairs:
                if (i, j) not in sums:
                    sums[i, j] = deltas[i].T @ deltas[j]
                else:
                    sums[i, j].addmm_(deltas[i].T, deltas[j])
        return torch.zeros(0)

    yield Fold(reduce_block, lambda parts: parts[-1], in_order=True)
    if centered:
        sizes = {i: float(sums[i, i].diagonal().sum()) for i in models}
        for (i, j), total in sums.items():
            total.addr_(row_sums[0][i], row_sums[0][j], alpha=-1 / task.shape[0])
        # If all rows of a task matrix are equal, only the rounding errors of the subtraction are left.
        constant = {i for i in models if float(sums[i, i].diagonal().sum()) <= _CONSTANT * sizes[i]}
        for (i, j), total in sums.items():
            if i in constant or j in constant:
                total.zero_()
    return sums


def collect_deltas(task: TensorTask, *, weighted: bool = True) -> Generator[Fold, Any, torch.Tensor]:
    """Yield the pass that copies the task vectors of a matrix into memory, and return them: ``[models, out, in]``.

    With ``weighted``, task vectors are multiplied by the weights of their models.
    """
    weights = _vector_weights(task, weighted)
    matrices: list[torch.Tensor] = []

    def reduce_block(block: Block) -> torch.Tensor:
        if not matrices:
            matrices.append(block.inputs.new_empty((len(weights), *task.shape)))
        row = block.start // task.shape[-1]
        for part in rows_of(block, task.shape[-1]):
            matrices[0][:, row : row + part.shape[1]] = deltas_of(part, weights).to(part.dtype)
            row += part.shape[1]
        return torch.zeros(0)

    yield Fold(reduce_block, lambda parts: parts[-1], in_order=True)
    return matrices.pop()


def _vector_weights(task: TensorTask, weighted: bool) -> list[float]:
    weights = task.model_values("weight")
    return weights if weighted else [1.0] * len(weights)

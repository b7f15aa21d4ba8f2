"""Matrices that answer as each model's own does to what flows through it: a least-squares problem for each matrix.

A linear layer of model i sees inputs with second moments ``G_i`` (the mean of ``x x'``). The matrix whose answers to
the inputs of all models are nearest to those of their own matrices ``X_i`` ``[out, in]`` is

    X = (sum w_i X_i G_i) (sum w_i G_i)^-1

* ``regmean``: ``G_i`` is measured on a text of model i's own (Jin et al. 2023, https://arxiv.org/abs/2212.09849), its
  off-diagonals times ``off_diagonals``: with 1, what the texts do not show is forgotten.
* ``wudi``: without a text, from the task vectors, which lie in the span of the inputs that they were trained on:
  ``G_i = d_i' d_i / |d_i|^2``, and ``ridge`` as floor. This is the optimum that WUDI walks towards (Cheng et al. 2025,
  https://arxiv.org/abs/2503.08099).

It is solved about the mean, so that what the inputs leave open stays the mean of the models. With
``m = sum w_i X_i / sum w_i``

    X = m + R (sum w_i G_i + floor)^-1,    R = sum w_i (X_i - m) G_i = sum w_i (X_i - m) (G_i - G_k)

where k is the last model, and the last step holds because ``sum w_i (X_i - m) = 0``: equal moments give exactly the
mean, and one product is saved. Rows do not depend on each other, so a block is a run of rows; float64 throughout,
Cholesky, the floor a share of the mean of the diagonal. What is no matrix of a linear layer, or was not measured, is
the mean.

Each expert of a mixture is a matrix of its own here, with moments of the tokens that were sent to it. Of what few
tokens reach, the floor leaves most to the mean; what none reaches is exactly the mean. Experts of some families lie as
``[in, out]`` (:attr:`.TensorTask.inputs_first`), where rows do depend on each other: ``R`` is summed over runs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.combination import check_mean, mean_of_models
from mergegate.merge_core.methods.contract import (
    Block,
    Costs,
    Fold,
    InputMoments,
    Map,
    Method,
    Parameter,
    Solve,
    Steps,
    TensorTask,
    Traits,
    add_in_order,
)
from mergegate.merge_core.methods.matrices import DeltaProducts, grain_of_rows, rows_of
from mergegate.merge_core.methods.task_vectors import LAMBDA

if TYPE_CHECKING:
    import torch

# Of the mean of the diagonal: moments are kept in float32, below that an input is rounding.
_FLOOR = 1e-6
_WEIGHT = Parameter("weight", "float", "non_base", 1.0, "how much the answers of each model count", 0.0)


@dataclass(frozen=True)
class _System:
    """The problem of one matrix, ready for any of its rows.

    Args:
        shares: Of each model in the mean; they add up to 1.
        differences: ``w_i (G_i - G_k)`` of all models but the last.
        factor: Of ``sum w_i G_i + floor``: its Cholesky factor, or its diagonal. None: nothing flows through it.
    """

    shares: tuple[float, ...]
    differences: tuple[torch.Tensor, ...]
    factor: torch.Tensor | None

    @property
    def is_matrix(self) -> bool:
        """Whether more than squares counts, and models differ in it."""
        return self.factor is not None and self.factor.ndim == 2 and bool(self.differences)

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        """``[models, rows, columns]`` → ``[rows, columns]``."""
        return add_in_order([own * share for own, share in zip(rows, self.shares, strict=True)])

    def solved(self, rows: torch.Tensor) -> torch.Tensor:
        """``[models, rows, in]`` float64 → ``[rows, in]``."""
        import torch

        mean = self.mean(rows)
        if self.factor is None or not self.differences:
            return mean
        pairs = list(zip(rows[:-1], self.differences, strict=True))
        if self.factor.ndim == 1:
            return mean + add_in_order([(own - mean) * apart for own, apart in pairs]) / self.factor
        right = add_in_order([(own - mean) @ apart for own, apart in pairs])
        return mean + torch.cholesky_solve(right.T, self.factor).T


def _system(weights: Sequence[float], moments: Sequence[torch.Tensor], floor: float) -> _System:
    """The problem with these moments, each ``[in, in]`` or each ``[in]`` in float64; their memory is used again."""
    import torch

    shares = tuple(weight / sum(weights) for weight in weights)
    total = moments[0] * weights[0]
    for moment, weight in zip(moments[1:], weights[1:], strict=True):
        total.add_(moment, alpha=weight)
    squares = total if total.ndim == 1 else total.diagonal()
    least = floor * float(squares.mean())
    if least <= 0:
        return _System(shares, (), None)
    squares += least
    *others, last = moments
    for moment, weight in zip(others, weights[:-1], strict=True):
        moment.sub_(last).mul_(weight)
    return _System(shares, tuple(others), total if total.ndim == 1 else torch.linalg.cholesky(total))


def _measured(moments: Sequence[InputMoments], off_diagonals: float, device: str) -> list[torch.Tensor]:
    """Moments as they count: squares alone where one model has no more, or no more is wanted."""
    import torch

    by_squares = off_diagonals == 0 or any(one.is_diagonal for one in moments)
    found = []
    for one in moments:
        values = torch.from_numpy(one.read()).to(device)
        squares = (values if one.is_diagonal else values.diagonal()).clone()
        if not by_squares:
            values.mul_(off_diagonals).diagonal().copy_(squares)
        found.append(squares if by_squares else values)
    return found


def _of_deltas(products: DeltaProducts, device: str) -> list[torch.Tensor]:
    """``d_i' d_i / |d_i|^2`` of each model; of one that was not trained here, zeros."""
    found = []
    for gram in products.taken().values():
        size = float(gram.diagonal().sum())
        found.append(gram.to(device).div_(size or 1.0))
    return found


def _answer(task: TensorTask, solved: Callable[[torch.Tensor, int], torch.Tensor]) -> Map:
    """The last pass.

    Args:
        task: The matrix.
        solved: ``[models, rows, columns]`` float64, and the number of the first row → ``[rows, columns]``.
    """
    scale = float(task.shared["lambda"])

    def of(block: Block) -> torch.Tensor:
        import torch

        done, row = [], block.start // task.shape[-1]
        for part in rows_of(block, task.shape[-1]):
            wide = part.double()
            found = solved(wide[1:] if task.has_base else wide, row)
            if task.has_base and scale != 1:
                found = wide[0] + (found - wide[0]) * scale
            done.append(found.to(part.dtype).reshape(-1))
            row += part.shape[1]
        return torch.cat(done)

    return Map(of)


class _Sides:
    """Of a matrix ``[in, out]``: ``R'``, summed over runs of its rows, and then what is added to the mean.

    Args:
        task: The matrix.
        system: Its problem.
    """

    def __init__(self, task: TensorTask, system: _System) -> None:
        self._task, self._system = task, system
        self._sum: torch.Tensor | None = None

    def fold(self) -> Fold:
        """The pass that adds it up."""
        return Fold(self._add, lambda parts: parts[-1], in_order=True)

    def _add(self, block: Block) -> torch.Tensor:
        import torch

        row = block.start // self._task.shape[-1]
        for part in rows_of(block, self._task.shape[-1]):
            models = part.double()[int(self._task.has_base) :]
            mean, rows = self._system.mean(models), slice(row, row + part.shape[1])
            for own, apart in zip(models[:-1], self._system.differences, strict=True):
                if self._sum is None:
                    self._sum = apart[:, rows] @ (own - mean)
                else:
                    self._sum.addmm_(apart[:, rows], own - mean)
            row += part.shape[1]
        return torch.zeros(0)

    def change(self) -> torch.Tensor:
        """``[in, out]``; what was summed goes."""
        import torch

        assert self._sum is not None
        assert self._system.factor is not None
        side, self._sum = self._sum, None
        return torch.cholesky_solve(side, self._system.factor)


def _answer_inputs_first(task: TensorTask, system: _System) -> Steps:
    """The answer of a matrix ``[in, out]``."""
    if system.is_matrix:
        sides = _Sides(task, system)
        yield sides.fold()
        change = yield Solve(lambda device: sides.change())
        return _answer(task, lambda models, row: system.mean(models) + change[row : row + models.shape[1]])

    def solved(models: torch.Tensor, row: int) -> torch.Tensor:
        mean = system.mean(models)
        if system.factor is None or not system.differences:
            return mean
        rows = slice(row, row + models.shape[1])
        pairs = zip(models[:-1], system.differences, strict=True)
        apart = add_in_order([(own - mean) * squares[rows, None] for own, squares in pairs])
        return mean + apart / system.factor[rows, None]

    return _answer(task, solved)


def _regmean(task: TensorTask) -> Steps:
    moments = task.model_moments if task.is_projection else ()
    if not moments:
        return mean_of_models(task)
    if wrong := next((one.width for one in moments if one.width != task.width), None):
        raise InvalidInput(
            task.name,
            found=f"measured inputs of width {wrong}",
            expected=f"{task.width}, the {'rows' if task.inputs_first else 'columns'} of the matrix",
        )
    weights, keep = task.column("weight"), float(task.shared["off_diagonals"])
    system = yield Solve(lambda device: _system(weights, _measured(moments, keep, device), _FLOOR))
    if task.inputs_first:
        return (yield from _answer_inputs_first(task, system))
    return _answer(task, lambda models, row: system.solved(models))


def _wudi(task: TensorTask) -> Steps:
    if not task.is_projection:
        return mean_of_models(task)
    weights, ridge = task.column("weight"), float(task.shared["ridge"])
    products = DeltaProducts(task, crossed=False, weighted=False)
    yield products.fold()
    system = yield Solve(lambda device: _system(weights, _of_deltas(products, device), ridge))
    return _answer(task, lambda models, row: system.solved(models))


def _models(task: TensorTask) -> int:
    return len(task.per_input) - task.has_base


def _solving(task: TensorTask, width: int) -> float:
    """Operations of the products with moments, of the factor, and of two triangular solves."""
    rows = task.numel // width
    return 2.0 * rows * width**2 * (_models(task) - 1) + width**3 / 3 + 2.0 * rows * width**2


def _has_matrices(task: TensorTask) -> bool:
    known = task.model_moments
    return bool(known) and not any(one.is_diagonal for one in known) and bool(task.shared["off_diagonals"])


def _held(task: TensorTask, width: int) -> int:
    """All moments, their sum and its factor, and what a factor is made with."""
    return 8 * width**2 * (_models(task) + 3)


def _held_sides(task: TensorTask) -> int:
    """Of a matrix ``[in, out]``: what is summed, what is solved, and a copy that solving takes."""
    return 3 * 8 * task.numel if task.inputs_first else 0


def _grams(task: TensorTask) -> float:
    return 2.0 * task.shape[0] * task.shape[1] ** 2 * _models(task)


METHODS = (
    Method(
        name="regmean",
        summary="Of each matrix the one that answers as each model's own does to the inputs of that model's own text",
        paper="RegMean, Jin et al. 2023, https://arxiv.org/abs/2212.09849",
        base="optional",
        models=(1, None),
        parameters=(
            _WEIGHT,
            Parameter(
                "off_diagonals",
                "float",
                "shared",
                0.9,
                "how much of what inputs have in common counts; with 1 what the texts do not show is forgotten",
                0.0,
                1.0,
            ),
            LAMBDA,
        ),
        steps=_regmean,
        grain=grain_of_rows,
        check=check_mean,
        costs=Costs(
            map=1.5,
            fold=1.5,
            folds=lambda task: int(task.inputs_first and _has_matrices(task)),
            products=lambda task: _solving(task, task.width) if _has_matrices(task) else 0.0,
            held=lambda task: _held(task, task.width) + _held_sides(task) if _has_matrices(task) else 0,
        ),
        traits=Traits(reads_text="moments"),
    ),
    Method(
        name="wudi",
        summary="Of each matrix the one that answers as each model's own does to what its task vector was trained on",
        paper="WUDI-Merging, Cheng et al. 2025, https://arxiv.org/abs/2503.08099; its optimum in closed form",
        base="required",
        models=(1, None),
        parameters=(
            _WEIGHT,
            Parameter("ridge", "float", "shared", 0.01, "share of the mean square that is added to every input", 1e-6),
            LAMBDA,
        ),
        steps=_wudi,
        grain=grain_of_rows,
        check=check_mean,
        costs=Costs(
            map=1.5,
            fold=1.5,
            folds=lambda task: int(task.is_projection),
            products=lambda task: _grams(task) + _solving(task, task.shape[-1]) if task.is_projection else 0.0,
            held=lambda task: _held(task, task.shape[-1]) if task.is_projection else 0,
        ),
    ),
)

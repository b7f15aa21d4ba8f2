"""Merge each linear layer by least squares, so that it reproduces the outputs of all models on their own inputs.

A linear layer of model i receives inputs with second moments ``G_i`` (the mean of ``x x'``). The merged matrix whose
outputs for the inputs of all models are closest to those of the models' own matrices ``X_i`` ``[out, in]`` is

    X = (sum w_i X_i G_i) (sum w_i G_i)^-1

* ``regmean``: ``G_i`` is measured on a calibration text of model i (Jin et al. 2023,
  https://arxiv.org/abs/2212.09849). Its off-diagonal elements are multiplied by ``off_diagonals``. At 1, the merge
  forgets anything that the texts do not show.
* ``wudi`` needs no text. Task vectors are in the span of the inputs that they were trained on, so
  ``G_i = d_i' d_i / |d_i|^2``, with ``ridge`` as the floor. This is the optimum that WUDI's iterations approach (Cheng
  et al. 2025, https://arxiv.org/abs/2503.08099).
* ``ace`` needs no text either. It estimates the covariance of the inputs of model i from its task matrix as
  ``C_i = c_i' c_i`` with ``c_i = d_i - (mean of its rows)`` (Xu et al. 2026, https://arxiv.org/abs/2603.02945). So
  ``G_i = C_i / s``, where ``s`` is the mean of all traces ``tr C_i``. Models that changed the matrix more count more.
  If the variance of ``ln tr C_i`` over the models exceeds 1, ``s`` is the model's own trace, so that no model drowns
  the others. ``ridge`` is the floor.

``ace`` differs from the published program in four points. There, the floor is 0.01 in absolute terms and the decision
to normalize depends on the unit of the traces, so results change if all task vectors are scaled. Here, they do not. The
published program also centers the task matrices that it averages, adds a rank-one matrix to the sum of the covariances,
and adds flattened singular directions to normalized matrices. With the first two, two equal models do not give that
model. The third costs skills that all models share (``dev/measurements/method-variations.md``).

The problem is solved around the mean, so that directions that the inputs leave open stay at the mean of the models.
With ``m = sum w_i X_i / sum w_i``

    X = m + R (sum w_i G_i + floor)^-1,    R = sum w_i (X_i - m) G_i = sum w_i (X_i - m) (G_i - G_k)

where k is the last model. The last step is possible because ``sum w_i (X_i - m) = 0``. With it, models with equal
moments give exactly the mean, and one product is saved. Rows do not depend on each other, so a block is a run of rows.
All arithmetic is float64, the solver is Cholesky, and the floor is a share of the mean of the diagonal. Tensors that
are not the matrix of a linear layer, or whose inputs were not measured, become the mean.

The matrices of each expert in a mixture are merged with the moments of the tokens that were routed to the expert. In
directions that few tokens have, the floor keeps the result near the mean. An expert without tokens becomes exactly the
mean. Some families store experts as ``[in, out]`` (:attr:`.TensorTask.inputs_first`). Their rows depend on each other,
so ``R`` is summed over runs of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import variance

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.combination import LAMBDA, check_mean, mean_of_models
from mergegate.merge_core.methods.contract import (
    Block,
    Costs,
    Fold,
    Map,
    Method,
    Parameter,
    Solve,
    Steps,
    TensorTask,
    Traits,
    add_in_order,
    torch,
)
from mergegate.merge_core.methods.matrices import costs_of_matrices, grain_of_rows, rows_of, sum_delta_products

# Floor, as a share of the mean of the diagonal. Moments are stored in float32, so smaller values are rounding noise.
_FLOOR = 1e-6
# Variance of ``ln tr C_i`` above which the covariances are normalized. The published criterion, this variance over the
# squared mean > 0.3, is the same for traces near 0.16, which is the mean of the demo family.
_UNEVEN = 1.0
_WEIGHT = Parameter("weight", "float", "non_base", 1.0, "weight of the outputs of each model", 0.0)
_RIDGE = "share of the mean square to add to the square of every input"


@dataclass(frozen=True)
class _System:
    """The least-squares problem of one matrix, which can be solved for any of its rows.

    Args:
        shares: Share of each model in the mean. The shares add up to 1.
        differences: ``w_i (G_i - G_k)`` for all models except the last.
        factor: Cholesky factor, or diagonal, of ``sum w_i G_i + floor``. None if all inputs are zero.
    """

    shares: tuple[float, ...]
    differences: tuple[torch.Tensor, ...]
    factor: torch.Tensor | None

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean of the models: ``[models, rows, columns]`` → ``[rows, columns]``."""
        return add_in_order([model * share for model, share in zip(rows, self.shares, strict=True)])

    def solve(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the merged rows: float64 ``[models, rows, in]`` → ``[rows, in]``."""
        mean = self.mean(rows)
        if self.factor is None or not self.differences:
            return mean
        pairs = list(zip(rows[:-1], self.differences, strict=True))
        if self.factor.ndim == 1:
            return mean + add_in_order([(model - mean) * difference for model, difference in pairs]) / self.factor
        right = add_in_order([(model - mean) @ difference for model, difference in pairs])
        return mean + torch.cholesky_solve(right.T, self.factor).T


def _set_up_system(weights: Sequence[float], moments: Sequence[torch.Tensor], floor: float) -> _System:
    """Set up the problem for float64 moments, all ``[in, in]`` or all ``[in]``. The moments are overwritten."""
    shares = tuple(weight / sum(weights) for weight in weights)
    total = moments[0] * weights[0]
    for moment, weight in zip(moments[1:], weights[1:], strict=True):
        total.add_(moment, alpha=weight)
    squares = total if total.ndim == 1 else total.diagonal()
    floor_value = floor * float(squares.mean())
    if floor_value <= 0:
        return _System(shares, (), None)
    squares += floor_value
    *differences, last = moments
    for moment, weight in zip(differences, weights[:-1], strict=True):
        moment.sub_(last).mul_(weight)
    return _System(shares, tuple(differences), total if total.ndim == 1 else torch.linalg.cholesky(total))


def _solve_map(task: TensorTask, solve: Callable[[torch.Tensor, int], torch.Tensor]) -> Map:
    """Return the map that merges runs of rows with ``solve``, and scales the change by ``lambda``.

    The arguments of ``solve`` are float64 ``[models, rows, columns]`` and the index of the first row. It returns
    ``[rows, columns]``.
    """
    scale = float(task.shared["lambda"])

    def map_block(block: Block) -> torch.Tensor:
        parts, row = [], block.start // task.shape[-1]
        for part in rows_of(block, task.shape[-1]):
            wide = part.double()
            merged = solve(wide[1:] if task.has_base else wide, row)
            if task.has_base and scale != 1:
                merged = wide[0] + (merged - wide[0]) * scale
            parts.append(merged.to(part.dtype).reshape(-1))
            row += part.shape[1]
        return torch.cat(parts)

    return Map(map_block)


def _solve_inputs_first(task: TensorTask, system: _System) -> Steps:
    """Merge a matrix that is stored as ``[in, out]``: sum ``R'`` over its rows, and add the solution to the mean."""
    factor = system.factor
    if factor is not None and factor.ndim == 2 and system.differences:
        sums: list[torch.Tensor] = []

        def reduce_block(block: Block) -> torch.Tensor:
            row = block.start // task.shape[-1]
            for part in rows_of(block, task.shape[-1]):
                models = part.double()[int(task.has_base) :]
                mean, rows = system.mean(models), slice(row, row + part.shape[1])
                for model, difference in zip(models[:-1], system.differences, strict=True):
                    if not sums:
                        sums.append(difference[:, rows] @ (model - mean))
                    else:
                        sums[0].addmm_(difference[:, rows], model - mean)
                row += part.shape[1]
            return torch.zeros(0)

        def compute(device: str) -> torch.Tensor:
            return torch.cholesky_solve(sums.pop(), factor)

        yield Fold(reduce_block, lambda parts: parts[-1], in_order=True)
        change = yield Solve(compute)
        return _solve_map(task, lambda models, row: system.mean(models) + change[row : row + models.shape[1]])

    def solve(models: torch.Tensor, row: int) -> torch.Tensor:
        mean = system.mean(models)
        if factor is None or not system.differences:
            return mean
        rows = slice(row, row + models.shape[1])
        pairs = zip(models[:-1], system.differences, strict=True)
        change_rows = add_in_order([(model - mean) * squares[rows, None] for model, squares in pairs])
        return mean + change_rows / factor[rows, None]

    return _solve_map(task, solve)


def _regmean(task: TensorTask) -> Steps:
    moments = task.model_moments if task.is_projection else ()
    if not moments:
        return mean_of_models(task)
    if width := next((item.width for item in moments if item.width != task.width), None):
        raise InvalidInput(
            task.name,
            found=f"measured inputs of width {width}",
            expected=f"{task.width}, the {'rows' if task.inputs_first else 'columns'} of the matrix",
        )
    weights, off_diagonals = task.model_values("weight"), float(task.shared["off_diagonals"])

    def compute(device: str) -> _System:
        # Use only the diagonals if no more was measured for some model, or if ``off_diagonals`` is 0.
        diagonal_only = off_diagonals == 0 or any(item.is_diagonal for item in moments)
        matrices = []
        for item in moments:
            values = torch.from_numpy(item.read()).to(device)
            squares = (values if item.is_diagonal else values.diagonal()).clone()
            if not diagonal_only:
                values.mul_(off_diagonals).diagonal().copy_(squares)
            matrices.append(squares if diagonal_only else values)
        return _set_up_system(weights, matrices, _FLOOR)

    system = yield Solve(compute)
    if task.inputs_first:
        return (yield from _solve_inputs_first(task, system))
    return _solve_map(task, lambda models, row: system.solve(models))


def _fit_deltas(task: TensorTask, *, centered: bool) -> Steps:
    """Merge a matrix with moments from the task vectors: those of ``ace`` if ``centered``, else those of ``wudi``."""
    if not task.is_projection:
        return mean_of_models(task)
    weights, ridge = task.model_values("weight"), float(task.shared["ridge"])
    products = yield from sum_delta_products(task, crossed=False, weighted=False, centered=centered)

    def compute(device: str) -> _System:
        moments = [gram.to(device) for gram in products.values()]
        traces = [float(gram.diagonal().sum()) for gram in moments]
        sizes = [math.log(trace) for trace in traces if trace > 0]  # A model may not have changed this matrix.
        is_uneven = len(sizes) > 1 and variance(sizes) > _UNEVEN
        mean_trace = sum(traces) / len(traces)
        for gram, trace in zip(moments, traces, strict=True):
            gram.div_((trace if is_uneven or not centered else mean_trace) or 1.0)
        return _set_up_system(weights, moments, ridge)

    system = yield Solve(compute)
    return _solve_map(task, lambda models, row: system.solve(models))


def _model_count(task: TensorTask) -> int:
    return len(task.per_input) - task.has_base


def _has_matrices(task: TensorTask) -> bool:
    moments = task.model_moments
    return bool(moments) and not any(item.is_diagonal for item in moments) and bool(task.shared["off_diagonals"])


def _solve_operations(task: TensorTask, width: int) -> float:
    """Count the operations of the products with moments, the factorization and two triangular solves."""
    rows = task.numel // width
    return 2.0 * rows * width**2 * (_model_count(task) - 1) + width**3 / 3 + 2.0 * rows * width**2


def _moment_bytes(task: TensorTask, width: int) -> int:
    """Return the bytes of all moments, their sum, its factor and the workspace of the factorization."""
    return 8 * width**2 * (_model_count(task) + 3)


# The products of task vectors, and the solution.
_DELTA_COSTS = costs_of_matrices(
    lambda task: 2.0 * task.shape[0] * task.shape[1] ** 2 * _model_count(task) + _solve_operations(task, task.shape[1]),
    lambda task: _moment_bytes(task, task.shape[-1]),
)

METHODS = (
    Method(
        name="regmean",
        formula="X = (Σ w_i X_i G_i) (Σ w_i G_i)⁻¹, G_i = mean of x x' of the inputs of the matrix",
        summary="Least-squares fit of each matrix to the outputs of all models on their own calibration texts",
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
                "factor of the correlations between inputs; at 1, the merge forgets what the texts do not show",
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
            products=lambda task: _solve_operations(task, task.width) if _has_matrices(task) else 0.0,
            # A matrix ``[in, out]`` adds the sum, the solution and a copy for the solver.
            held_bytes=lambda task: (
                _moment_bytes(task, task.width) + (3 * 8 * task.numel if task.inputs_first else 0)
                if _has_matrices(task)
                else 0
            ),
        ),
        traits=Traits(reads_text="moments"),
    ),
    Method(
        name="wudi",
        formula="X = b + λ (Σ w_i d_i G_i) (Σ w_i G_i)⁻¹, d_i = X_i - b, G_i = d_i' d_i / |d_i|²",
        summary="Least-squares fit of each matrix to the outputs of all models on inputs that the task vectors imply",
        paper="WUDI-Merging, Cheng et al. 2025, https://arxiv.org/abs/2503.08099; its optimum in closed form",
        base="required",
        models=(1, None),
        parameters=(
            _WEIGHT,
            Parameter("ridge", "float", "shared", 0.01, _RIDGE, 1e-6),
            LAMBDA,
        ),
        steps=partial(_fit_deltas, centered=False),
        grain=grain_of_rows,
        check=check_mean,
        costs=_DELTA_COSTS,
    ),
    Method(
        name="ace",
        formula="X = b + λ (Σ w_i d_i G_i) (Σ w_i G_i)⁻¹, d_i = X_i - b, G_i = covariance of the rows of d_i",
        summary="Least-squares fit of each matrix to the outputs of all models, with input covariances estimated from"
        " the task vectors",
        paper="ACE-Merging, Xu et al. 2026, https://arxiv.org/abs/2603.02945; without its spectral refinement",
        base="required",
        models=(1, None),
        parameters=(_WEIGHT, Parameter("ridge", "float", "shared", 1.0, _RIDGE, 1e-3), LAMBDA),
        steps=partial(_fit_deltas, centered=True),
        grain=grain_of_rows,
        check=check_mean,
        costs=_DELTA_COSTS,
    ),
)

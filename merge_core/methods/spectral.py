"""Task matrices taken apart by their singular vectors. Experimental: nobody has shown that on large language models
these do better than plain task vectors at their best scale.

With task matrices ``d_i = w_i (x_i - b)`` ``[out, in]`` of k models, ``d_i = U_i S_i V_i'``:

* ``tsv_m``: of each task the leading ``min(out, in) // k`` triplets; all their ``U`` side by side, and all their ``V``,
  are replaced by the nearest matrices with orthonormal columns, so that tasks no longer share directions; then
  multiplied again. Gargiulo et al. 2025, https://arxiv.org/abs/2412.00081. Orthonormal by pseudo-inverse square roots:
  the published singular value form is not unique where two models are alike, and merges a model with itself wrongly.
* ``svc``: the sum ``M = sum d_i = U S V'``, of which each direction is shrunk where the tasks already agree on it. With
  ``a_r = u_r' M`` and ``a_ri = u_r' d_i``, ``s_ri = <a_r, a_ri> / |a_ri|^2``, the r-th singular value is multiplied by
  ``k / sum_i max(alpha, s_ri)``. https://arxiv.org/abs/2602.05536. What is said to be ``merged`` (by any method: the
  result of another document) takes the place of the sum: the after-treatment of a merge.

* ``knots``: ``[d_1 .. d_k] = U S [V_1' .. V_k']``; in the directions ``U`` that all tasks share, ``S V_i'`` are merged
  by TIES (the ``density`` largest of each, signs elected, what agrees averaged), and turned back. For adapters, whose
  own directions have nothing to do with each other. Stoica et al. 2025, https://arxiv.org/abs/2410.19735

The first two need the products of task matrices only, of the shorter side: where a matrix has more rows than columns,
``d_i' d_j`` is summed over runs of rows and the result is ``sum d_i M_i``, run by run; else, and for ``knots``, it is
held whole. Eigenvectors are not unique (signs, equal values), what is made of them here is: they come in pairs. What is
no matrix of a linear layer is the mean of the task vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.combination import combine
from mergegate.merge_core.methods.contract import (
    Block,
    Costs,
    Map,
    Method,
    Parameter,
    Solve,
    Steps,
    TensorTask,
    Traits,
    Values,
    add_in_order,
)
from mergegate.merge_core.methods.matrices import DeltaProducts, WholeDeltas, deltas_of, grain_of_rows, rows_of
from mergegate.merge_core.methods.task_vectors import LAMBDA, VectorCombination, mix

if TYPE_CHECKING:
    import torch

    # d_i' d_j of every two models, i <= j; of long rows d_i d_j'.
    Products: TypeAlias = Mapping[tuple[int, int], torch.Tensor]

# Of the largest singular value: below it they are rounding. The square root of float64's precision is 1.5e-8.
_RANK = 1e-6
# Of the largest eigenvalue of directions of all tasks together: below it they are the same direction.
_OVERLAP = 1e-9
# Columns of a matrix that is held whole, as they are widened.
_CHUNK = 2048
_WEIGHT = Parameter("weight", "float", "non_base", 1.0, "factor of each task vector")
_DENSITY = Parameter(
    "density", "float", "non_base", 0.5, "share of each task's numbers in the shared directions that is kept", 0.0, 1.0
)
_MERGED = Parameter(
    "merged", "bool", "non_base", False, "this model is what the others were merged into: it is treated, not their sum"
)
_ALPHA = Parameter("alpha", "float", "shared", 1.0, "least agreement that is assumed; 1 only shrinks", 1e-3)


def _of(products: Products, i: int, j: int) -> torch.Tensor:
    return products[i, j] if i <= j else products[j, i].T


def _directions(gram: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Leading eigenvectors ``[n, r]`` of a Gram matrix and singular values ``[r]``, of numerical rank at most."""
    import torch

    values, vectors = torch.linalg.eigh(gram)
    sizes = values.flip(0).clamp_min(0).sqrt()
    rank = min(most, int((sizes > _RANK * sizes[0]).sum()))
    return vectors.flip(1)[:, :rank], sizes[:rank]


def _inverse_root(gram: torch.Tensor) -> torch.Tensor:
    """``gram^(-1/2)`` on the space that it spans."""
    import torch

    if not len(gram):
        return gram
    values, vectors = torch.linalg.eigh(gram)
    powers = torch.where(values > _OVERLAP * values[-1], values.clamp_min(1e-300).rsqrt(), 0.0)
    root: torch.Tensor = (vectors * powers) @ vectors.T
    return root


def _tsv_factors(products: Products, models: int, shorter: int, task: TensorTask) -> list[torch.Tensor | None]:
    """``M_i`` of each model, so that the merged task matrix is ``sum d_i M_i``."""
    import torch

    parts = [_directions(products[i, i], shorter // models) for i in range(models)]
    left = [vectors / sizes for vectors, sizes in parts]  # U_i = d_i V_i / S_i
    crossed = torch.cat(
        [torch.cat([left[i].T @ _of(products, i, j) @ left[j] for j in range(models)], 1) for i in range(models)]
    )
    right = torch.cat([vectors for vectors, _ in parts], 1)
    sizes = torch.cat([sizes for _, sizes in parts])
    middle = (_inverse_root(crossed) * sizes) @ _inverse_root(right.T @ right) @ right.T
    rows = torch.split(middle, [len(own) for _, own in parts])
    return [own @ part for own, part in zip(left, rows, strict=True)]


def _divided(task: TensorTask) -> tuple[list[int], list[int]]:
    """Numbers of the models that are tasks, and of those whose sum is treated: the same, or the one that is merged."""
    merged = [at for at, values in enumerate(task.per_input[1:]) if values.get("merged")]
    tasks = [at for at in range(len(task.per_input) - 1) if at not in merged]
    return tasks, merged or tasks


def _check_merged(shared: Values, per_input: Sequence[Values], where: str) -> None:
    said = [values["merged"] for values in per_input if "merged" in values]
    if sum(said) > 1 or all(said):
        raise InvalidInput(
            f"{where}: merged",
            found=f"{sum(said)} of {len(said)} models",
            expected="none, or one beside those that were merged into it",
        )


def _calibrated(
    products: Products, task: TensorTask, agreements: Callable[..., torch.Tensor]
) -> list[torch.Tensor | None]:
    """``V gamma V'`` of what is treated, or ``U gamma U'``, in the space of the products; of all others None."""
    tasks, treated = _divided(task)
    total = add_in_order([_of(products, i, j) for i in treated for j in treated])
    vectors, sizes = _directions(total, len(total))
    alpha = float(task.shared["alpha"])
    with_all = {i: add_in_order([_of(products, j, i) for j in treated]) for i in tasks}
    shrunk = add_in_order([agreements(i, with_all[i], vectors, sizes).clamp_min(alpha) for i in tasks])
    factor = (vectors * (len(tasks) / shrunk)) @ vectors.T
    return [factor if at in treated else None for at in range(len(task.per_input) - 1)]


def _svc_by_columns(products: Products, models: int, shorter: int, task: TensorTask) -> list[torch.Tensor | None]:
    """From ``d_i' d_j``: ``<a_r, a_ri> = v' P_i v`` and ``|a_ri| = |P_i' v| / s`` with ``P_i = M' d_i``."""

    def agreements(i: int, product: torch.Tensor, vectors: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        import torch

        with_all = product.T @ vectors
        length = with_all.square().sum(0) / sizes.square()
        together = (vectors * with_all).sum(0)
        return torch.where(length > 0, together / length.clamp_min(1e-300), 0.0)

    return _calibrated(products, task, agreements)


def _svc_by_rows(products: Products, models: int, shorter: int, task: TensorTask) -> list[torch.Tensor | None]:
    """From ``d_i d_j'``: ``<a_r, a_ri> = u' M d_i' u`` and ``|a_ri|^2 = u' d_i d_i' u``."""

    def agreements(i: int, product: torch.Tensor, vectors: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        import torch

        length = (vectors * (products[i, i] @ vectors)).sum(0)
        together = (vectors * (product @ vectors)).sum(0)
        return torch.where(length > 0, together / length.clamp_min(1e-300), 0.0)

    return _calibrated(products, task, agreements)


def _mean(weights: Sequence[float], scale: float, treated: Sequence[int]) -> Map:
    """Of what is no matrix: the mean of the weighted task vectors, scaled; of a merge that is treated it alone."""
    shares = [weight * scale / len(treated) if at in treated else 0.0 for at, weight in enumerate(weights)]
    return combine(shares, about_base=True)


# One for each model, with which its task matrix is multiplied; None: it does not count itself.
Factors: TypeAlias = "Callable[[Products, int, int, TensorTask], list[torch.Tensor | None]]"


def _steps(by_columns: Factors, by_rows: Factors) -> Callable[[TensorTask], Steps]:
    def steps(task: TensorTask) -> Steps:
        weights, scale = task.column("weight"), float(task.shared["lambda"])
        models = len(weights)
        if not task.is_projection:
            return _mean(weights, scale, _divided(task)[1])
        out, width = task.shape
        if out < width:
            whole = WholeDeltas(task)
            yield whole.fold()
            merged = yield Solve(lambda device: _merged_whole(whole.taken(), by_rows, task))
            return _placed(task, merged, scale)
        products = DeltaProducts(task, crossed=True)
        yield products.fold()
        factors = yield Solve(lambda device: by_columns(products.taken(), models, width, task))
        return _multiplied(task, factors, weights, scale)

    return steps


def _merged_whole(deltas: torch.Tensor, by_rows: Factors, task: TensorTask) -> torch.Tensor:
    """``sum M_i' d_i`` ``[out, in]`` of task matrices ``[models, out, in]``, column by column in float64."""
    import torch

    models, out, _ = deltas.shape
    pairs = [(i, j) for i in range(models) for j in range(i, models)]
    products = {pair: deltas.new_zeros((out, out), dtype=torch.float64) for pair in pairs}
    for chunk in torch.split(deltas, _CHUNK, dim=2):
        wide = chunk.double()
        for (i, j), total in products.items():
            total.addmm_(wide[i], wide[j].T)
    factors = by_rows(products, models, out, task)
    products.clear()
    merged = torch.empty_like(deltas[0])
    columns = zip(torch.split(deltas, _CHUNK, dim=2), torch.split(merged, _CHUNK, dim=1), strict=True)
    for chunk, into in columns:
        beside = zip(factors, chunk, strict=True)
        into.copy_(add_in_order([factor.T @ own.double() for factor, own in beside if factor is not None]))
    return merged


def _knots(task: TensorTask) -> Steps:
    weights, scale = task.column("weight"), float(task.shared["lambda"])
    if not task.is_projection:
        return _mean(weights, scale, range(len(weights)))
    whole = WholeDeltas(task, weighted=False)
    yield whole.fold()
    merged = yield Solve(lambda device: _in_shared_directions(whole.taken(), weights, task.column("density")))
    return _placed(task, merged, scale)


def _in_shared_directions(deltas: torch.Tensor, weights: Sequence[float], densities: Sequence[float]) -> torch.Tensor:
    """Task matrices ``[models, out, in]`` merged by TIES in the left singular directions of all of them together."""
    import torch

    models, out, width = deltas.shape
    aside = deltas.permute(1, 0, 2).reshape(out, models * width)  # [d_1 .. d_k]
    if out <= models * width:
        vectors, _ = _directions(_products_of(aside.T), out)
        back = vectors
        turned = torch.cat([(vectors.T @ part.double()).to(deltas.dtype) for part in torch.split(aside, _CHUNK, 1)], 1)
    else:  # The same from the other side: U' [d_1 .. d_k] = S V', U = [d_1 .. d_k] V / S
        vectors, sizes = _directions(_products_of(aside), models * width)
        turned = (vectors * sizes).T.to(deltas.dtype)
        inverse = vectors / sizes
        back = torch.cat([part.double() @ inverse for part in torch.split(aside, _CHUNK)])
    merged = _elected(list(torch.split(turned, width, 1)), weights, densities)
    return (back @ merged.double()).to(deltas.dtype)


def _products_of(rows: torch.Tensor) -> torch.Tensor:
    """``rows' rows`` in float64, widened a few rows at a time."""
    import torch

    total = rows.new_zeros((rows.shape[1], rows.shape[1]), dtype=torch.float64)
    for part in torch.split(rows, _CHUNK):
        wide = part.double()
        total.addmm_(wide.T, wide)
    return total


def _elected(turned: list[torch.Tensor], weights: Sequence[float], densities: Sequence[float]) -> torch.Tensor:
    """TIES of a few matrices of one shape."""
    import torch

    kept = [_largest(own, density) for own, density in zip(turned, densities, strict=True)]
    mixing = VectorCombination(tuple(weights), vote="sum", normalize=True, scale=1.0)
    return mix(mixing, torch.zeros_like(kept[0]), torch.stack(kept))


def _largest(values: torch.Tensor, density: float) -> torch.Tensor:
    """``values`` with all but the ``density`` largest magnitudes zero; of equal ones all are kept."""
    import torch

    kept = int(density * values.numel())
    if kept >= values.numel():
        return values
    if kept == 0:
        return torch.zeros_like(values)
    sizes = values.abs()
    threshold = sizes.reshape(-1).kthvalue(values.numel() - kept + 1).values
    return torch.where(sizes >= threshold, values, 0.0)


def _placed(task: TensorTask, merged: torch.Tensor, scale: float) -> Map:
    flat = merged.reshape(-1)
    return Map(lambda block: block.base + flat[block.start : block.start + len(block.base)] * scale)


def _multiplied(task: TensorTask, factors: list[torch.Tensor | None], weights: list[float], scale: float) -> Map:
    def of(block: Block) -> torch.Tensor:
        import torch

        done = []
        for part in rows_of(block, task.shape[-1]):
            deltas = deltas_of(part, weights)
            pairs = zip(deltas, factors, strict=True)
            merged = add_in_order([own @ factor for own, factor in pairs if factor is not None])
            done.append((part[0].double() + merged * scale).to(part.dtype).reshape(-1))
        return torch.cat(done)

    return Map(of)


def _products_made(task: TensorTask, decompositions: float) -> float:
    """Operations: products of every two models, decompositions, and the factors applied."""
    if not task.is_projection:
        return 0.0
    models = len(task.per_input) - 1
    shorter, longer = min(task.shape), max(task.shape)
    return 2.0 * longer * shorter**2 * (models * (models + 1) / 2 + models) + decompositions * shorter**3


def _held(task: TensorTask, apart: int) -> int:
    """Products, factors, ``apart`` matrices of their size while they are taken apart; task matrices held whole."""
    if not task.is_projection:
        return 0
    models = len(task.per_input) - 1
    shorter, longer = min(task.shape), max(task.shape)
    whole = 4 * shorter * longer * (models + 1) if task.shape[0] < task.shape[1] else 0
    return 8 * shorter**2 * (models * (models + 1) // 2 + models + apart) + whole


# An eigendecomposition takes about as long as products of so many n^3 operations (4096: 24.5 s at 35e9 a second).
_EIGH = 12.5


def _method(
    name: str, summary: str, paper: str, by_columns: Factors, by_rows: Factors, eigh: int, apart: int, *more: Parameter
) -> Method:
    return Method(
        name=name,
        summary=f"{summary} (experimental)",
        paper=paper,
        base="required",
        models=(1, None),
        parameters=(_WEIGHT, *more, LAMBDA),
        steps=_steps(by_columns, by_rows),
        grain=grain_of_rows,
        check=_check_merged if _MERGED in more else lambda *_: None,
        costs=Costs(
            map=1.5,
            fold=1.5,
            folds=lambda task: int(task.is_projection),
            products=lambda task: _products_made(task, eigh * _EIGH),
            held=lambda task: _held(task, apart),
        ),
    )


def _knots_side(task: TensorTask) -> tuple[int, int, int]:
    """Models, the side that is taken apart, and the other one, of all task matrices beside each other."""
    models, (out, width) = len(task.per_input) - 1, task.shape
    return models, min(out, models * width), max(out, models * width)


def _products_of_knots(task: TensorTask) -> float:
    if not task.is_projection:
        return 0.0
    _, side, other = _knots_side(task)
    return 2.0 * side**2 * other * 2.5 + _EIGH * side**3


def _held_by_knots(task: TensorTask) -> int:
    """Task matrices whole, beside each other, and as they are turned, a few of one such; products and directions."""
    if not task.is_projection:
        return 0
    _, side, other = _knots_side(task)
    return 4 * (3 * side * other + 8 * task.shape[0] * task.shape[1]) + 8 * (4 * side**2 + side * task.shape[0])


METHODS = (
    Method(
        name="knots",
        summary="TIES in the directions that all task matrices share; for adapters too (experimental)",
        paper="KnOTS, Stoica et al. 2025, https://arxiv.org/abs/2410.19735",
        base="required",
        models=(1, None),
        parameters=(_WEIGHT, _DENSITY, LAMBDA),
        steps=_knots,
        grain=grain_of_rows,
        costs=Costs(
            map=1.5,
            fold=1.5,
            folds=lambda task: int(task.is_projection),
            products=_products_of_knots,
            held=_held_by_knots,
        ),
        traits=Traits(adapters="products"),
    ),
    _method(
        "tsv_m",
        "Leading singular directions of each task matrix, made orthogonal to those of the others, added up",
        "Task Singular Vectors, Gargiulo et al. 2025, https://arxiv.org/abs/2412.00081",
        _tsv_factors,
        _tsv_factors,
        4,
        9,
    ),
    _method(
        "svc",
        "The sum of the task matrices with each direction shrunk as far as the models agree on it",
        "Singular value calibration, 2026, https://arxiv.org/abs/2602.05536",
        _svc_by_columns,
        _svc_by_rows,
        1,
        4,
        _ALPHA,
        _MERGED,
    ),
)

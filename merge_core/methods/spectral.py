"""Merge the task matrices of linear layers by their singular vectors.

These methods are experimental. It is not proven that they beat plain task vectors at their best scale on large language
models. With task matrices ``d_i = w_i (x_i - b) = U_i S_i V_i'`` ``[out, in]`` of k models:

* ``tsv_m`` takes the leading ``min(out, in) // k`` singular triplets of each task matrix. It concatenates all ``U`` and
  all ``V`` and replaces both by the nearest matrices with orthonormal columns, so that tasks no longer share
  directions. Then it multiplies the factors again. Gargiulo et al. 2025, https://arxiv.org/abs/2412.00081. The paper
  computes the orthonormal matrices by singular value decomposition, which is not unique if two models share a
  direction, and which merges a model with itself incorrectly. Here they come from pseudo-inverse square roots.
* ``svc`` takes the sum ``M = sum d_i = U S V'`` and shrinks each direction that the tasks agree on. With
  ``a_r = u_r' M``, ``a_ri = u_r' d_i`` and ``s_ri = <a_r, a_ri> / |a_ri|^2``, it multiplies the r-th singular value by
  ``k / sum_i max(alpha, s_ri)``. https://arxiv.org/abs/2602.05536. If the recipe marks a model as ``merged``, that
  model replaces the sum, so that ``svc`` post-processes a merge by any other method.
* ``knots`` decomposes ``[d_1 .. d_k] = U S [V_1' .. V_k']``. In the directions ``U``, which all tasks share, it merges
  the matrices ``S V_i'`` by TIES, and transforms the result back. It is meant for adapters, whose own directions are
  unrelated. Stoica et al. 2025, https://arxiv.org/abs/2410.19735

The first two methods only need products of task matrices along the shorter side. For a matrix with at least as many
rows as columns, ``d_i' d_j`` is summed over runs of rows, and the result ``sum d_i M_i`` is computed run by run.
Otherwise, and for ``knots``, the whole matrix is in memory. Eigenvectors are not unique (signs, equal eigenvalues), but
they only enter in pairs, so the results are unique. Tensors that are not the matrix of a linear layer become the mean
of the task vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.combination import LAMBDA, combine
from mergegate.merge_core.methods.contract import (
    Block,
    Map,
    Method,
    Parameter,
    Solve,
    Steps,
    TensorTask,
    Traits,
    Values,
    add_in_order,
    torch,
)
from mergegate.merge_core.methods.matrices import (
    collect_deltas,
    costs_of_matrices,
    deltas_of,
    grain_of_rows,
    rows_of,
    sum_delta_products,
)
from mergegate.merge_core.methods.task_vectors import VectorCombination, mix

if TYPE_CHECKING:
    from mergegate.merge_core.methods.matrices import Products

    # Function from the products d_i' d_j (for matrices with long rows, d_i d_j') to one factor per model, by which its
    # task matrix is multiplied. None: the result does not include the task matrix.
    Factors: TypeAlias = Callable[[Products, "TensorTask"], list[torch.Tensor | None]]

# Share of the largest singular value below which values are rounding noise. The square root of float64's precision is
# 1.5e-8.
_RANK = 1e-6
# Directions of several tasks count as the same below this share of the largest eigenvalue of their Gram matrix.
_OVERLAP = 1e-9
# Number of columns of a matrix in memory that are widened at a time.
_CHUNK = 2048
_WEIGHT = Parameter("weight", "float", "non_base", 1.0, "factor of each task vector")
_DENSITY = Parameter(
    "density", "float", "non_base", 0.5, "share of each task's numbers in the shared directions to keep", 0.0, 1.0
)
_MERGED = Parameter("merged", "bool", "non_base", False, "this model is the merge of the others and replaces their sum")
_ALPHA = Parameter("alpha", "float", "shared", 1.0, "lower bound of the agreement; 1 only shrinks directions", 1e-3)


def _product(products: Products, i: int, j: int) -> torch.Tensor:
    return products[i, j] if i <= j else products[j, i].T


def _directions(gram: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the leading eigenvectors ``[n, r]`` and singular values ``[r]`` of a Gram matrix.

    ``r`` is the numerical rank, or ``most`` if that is smaller.
    """
    values, vectors = torch.linalg.eigh(gram)
    sizes = values.flip(0).clamp_min(0).sqrt()
    rank = min(most, int((sizes > _RANK * sizes[0]).sum()))
    return vectors.flip(1)[:, :rank], sizes[:rank]


def _inverse_root(gram: torch.Tensor) -> torch.Tensor:
    """Return the pseudo-inverse square root ``gram^(-1/2)``."""
    if not len(gram):
        return gram
    values, vectors = torch.linalg.eigh(gram)
    powers = torch.where(values > _OVERLAP * values[-1], values.clamp_min(1e-300).rsqrt(), 0.0)
    root: torch.Tensor = (vectors * powers) @ vectors.T
    return root


def _tsv_factors(products: Products, task: TensorTask) -> list[torch.Tensor | None]:
    """Return ``M_i`` for each model, so that the merged task matrix is ``sum d_i M_i``."""
    models = len(task.per_input) - 1
    parts = [_directions(products[i, i], min(task.shape) // models) for i in range(models)]
    left_vectors = [vectors / sizes for vectors, sizes in parts]  # U_i = d_i V_i / S_i
    crossed = torch.cat(
        [
            torch.cat([left_vectors[i].T @ _product(products, i, j) @ left_vectors[j] for j in range(models)], 1)
            for i in range(models)
        ]
    )
    right = torch.cat([vectors for vectors, _ in parts], 1)
    sizes = torch.cat([sizes for _, sizes in parts])
    middle = (_inverse_root(crossed) * sizes) @ _inverse_root(right.T @ right) @ right.T
    rows = torch.split(middle, [len(vectors) for _, vectors in parts])
    return [vectors @ part for vectors, part in zip(left_vectors, rows, strict=True)]


def _split_models(task: TensorTask) -> tuple[list[int], list[int]]:
    """Return the indices of the task models, and of the models whose sum is calibrated.

    These are the same unless a model is marked as merged. Then only that model is calibrated.
    """
    merged = [index for index, values in enumerate(task.per_input[1:]) if values.get("merged")]
    tasks = [index for index in range(len(task.per_input) - 1) if index not in merged]
    return tasks, merged or tasks


def _check_merged(shared_values: Values, per_input: Sequence[Values], location: str) -> None:
    flags = [values["merged"] for values in per_input if "merged" in values]
    if sum(flags) > 1 or all(flags):
        raise InvalidInput(
            f"{location}: merged",
            found=f"{sum(flags)} of {len(flags)} models are marked as merged",
            expected="at most one merged model, together with the models that were merged into it",
        )


def _svc_factors(products: Products, task: TensorTask) -> list[torch.Tensor | None]:
    """Return ``V gamma V'`` or ``U gamma U'`` for each calibrated model, and None for the others.

    With the products ``d_i' d_j``, ``<a_r, a_ri> = v' P_i v`` and ``|a_ri| = |P_i' v| / s`` with ``P_i = M' d_i``.
    With ``d_i d_j'``, ``<a_r, a_ri> = u' M d_i' u`` and ``|a_ri|^2 = u' d_i d_i' u``.
    """
    tasks, treated = _split_models(task)
    total = add_in_order([_product(products, i, j) for i in treated for j in treated])
    vectors, sizes = _directions(total, len(total))
    agreements = []
    for i in tasks:
        product = add_in_order([_product(products, j, i) for j in treated])
        if task.shape[0] < task.shape[1]:
            length = (vectors * (products[i, i] @ vectors)).sum(0)
            overlap = (vectors * (product @ vectors)).sum(0)
        else:
            with_all = product.T @ vectors
            length = with_all.square().sum(0) / sizes.square()
            overlap = (vectors * with_all).sum(0)
        agreement = torch.where(length > 0, overlap / length.clamp_min(1e-300), 0.0)
        agreements.append(agreement.clamp_min(float(task.shared["alpha"])))
    factor = (vectors * (len(tasks) / add_in_order(agreements))) @ vectors.T
    return [factor if index in treated else None for index in range(len(task.per_input) - 1)]


def _mean(weights: Sequence[float], scale: float, model_indices: Sequence[int]) -> Map:
    """Return the map that adds the scaled mean of some weighted task vectors to the base."""
    shares = [
        weight * scale / len(model_indices) if index in model_indices else 0.0 for index, weight in enumerate(weights)
    ]
    return combine(shares, about_base=True)


def _merge_in_memory(deltas: torch.Tensor, compute_factors: Factors, task: TensorTask) -> torch.Tensor:
    """Return ``sum M_i' d_i`` of task matrices: ``[models, out, in]`` → ``[out, in]``, in chunks of columns."""
    models, out, _ = deltas.shape
    pairs = [(i, j) for i in range(models) for j in range(i, models)]
    products = {pair: deltas.new_zeros((out, out), dtype=torch.float64) for pair in pairs}
    for chunk in torch.split(deltas, _CHUNK, dim=2):
        wide = chunk.double()
        for (i, j), total in products.items():
            total.addmm_(wide[i], wide[j].T)
    factors = compute_factors(products, task)
    products.clear()
    merged = torch.empty_like(deltas[0])
    columns = zip(torch.split(deltas, _CHUNK, dim=2), torch.split(merged, _CHUNK, dim=1), strict=True)
    for chunk, target in columns:
        pairs_of_chunks = zip(factors, chunk, strict=True)
        target.copy_(
            add_in_order([factor.T @ delta.double() for factor, delta in pairs_of_chunks if factor is not None])
        )
    return merged


def _knots(task: TensorTask) -> Steps:
    """Merge the task matrices by TIES in the left singular directions that they share."""
    weights, scale = task.model_values("weight"), float(task.shared["lambda"])
    if not task.is_projection:
        return _mean(weights, scale, range(len(weights)))
    deltas = yield from collect_deltas(task, weighted=False)

    def merge(device: str) -> torch.Tensor:
        models, out, width = deltas.shape
        stacked = deltas.permute(1, 0, 2).reshape(out, models * width)  # [d_1 .. d_k]
        if out <= models * width:
            vectors, _ = _directions(_gram_of_rows(stacked.T), out)
            back = vectors
            projected = torch.cat(
                [(vectors.T @ part.double()).to(deltas.dtype) for part in torch.split(stacked, _CHUNK, 1)], 1
            )
        else:  # The same from the other side: U' [d_1 .. d_k] = S V', U = [d_1 .. d_k] V / S
            vectors, sizes = _directions(_gram_of_rows(stacked), models * width)
            projected = (vectors * sizes).T.to(deltas.dtype)
            inverse = vectors / sizes
            back = torch.cat([part.double() @ inverse for part in torch.split(stacked, _CHUNK)])
        matrices = zip(torch.split(projected, width, 1), task.model_values("density"), strict=True)
        sparse = []
        for matrix, density in matrices:
            # Keep the ``density`` largest magnitudes. Ties at the threshold are kept.
            values, count = matrix, int(density * matrix.numel())
            if count < matrix.numel():
                values = torch.zeros_like(matrix)
                if count > 0:
                    sizes_of_values = matrix.abs()
                    threshold = sizes_of_values.reshape(-1).kthvalue(matrix.numel() - count + 1).values
                    values = torch.where(sizes_of_values >= threshold, matrix, 0.0)
            sparse.append(values)
        sparse_matrices = torch.stack(sparse)
        mixing = VectorCombination(tuple(weights), vote="sum", normalize=True, scale=1.0)
        merged = mix(mixing, torch.zeros_like(sparse_matrices[0]), sparse_matrices)
        return (back @ merged.double()).to(deltas.dtype)

    merged = yield Solve(merge)
    return _add_to_base(merged, scale)


def _gram_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows' rows`` in float64, widening a few rows at a time."""
    total = rows.new_zeros((rows.shape[1], rows.shape[1]), dtype=torch.float64)
    for part in torch.split(rows, _CHUNK):
        wide = part.double()
        total.addmm_(wide.T, wide)
    return total


def _add_to_base(merged_change: torch.Tensor, scale: float) -> Map:
    flat = merged_change.reshape(-1)
    return Map(lambda block: block.base + flat[block.start : block.start + len(block.base)] * scale)


def _product_operations(task: TensorTask, decompositions: float) -> float:
    """Count the operations of the products of all pairs of models, the decompositions, and applying the factors."""
    models = len(task.per_input) - 1
    shorter, longer = min(task.shape), max(task.shape)
    return 2.0 * longer * shorter**2 * (models * (models + 1) / 2 + models) + decompositions * shorter**3


def _held_bytes(task: TensorTask, workspaces: int) -> int:
    """Return the memory for products, factors, decompositions and task matrices, in bytes."""
    models = len(task.per_input) - 1
    shorter, longer = min(task.shape), max(task.shape)
    matrix_bytes = 4 * shorter * longer * (models + 1) if task.shape[0] < task.shape[1] else 0
    return 8 * shorter**2 * (models * (models + 1) // 2 + models + workspaces) + matrix_bytes


# An eigendecomposition of ``[n, n]`` takes as long as this many times n^3 operations in products (n = 4096: 24.5 s at
# 35e9 operations per second).
_EIGH = 12.5


def _method(compute_factors: Factors, *, decompositions: int, workspaces: int, **fields: Any) -> Method:
    """Return a method that multiplies task matrices by factors. ``fields`` are the other fields of :class:`.Method`.

    It costs ``decompositions`` eigendecompositions, and memory for ``workspaces`` matrices of the size of a product.
    """

    def steps(task: TensorTask) -> Steps:
        weights, scale = task.model_values("weight"), float(task.shared["lambda"])
        if not task.is_projection:
            return _mean(weights, scale, _split_models(task)[1])
        out, width = task.shape
        if out < width:
            deltas = yield from collect_deltas(task)
            merged = yield Solve(lambda device: _merge_in_memory(deltas, compute_factors, task))
            return _add_to_base(merged, scale)
        products = yield from sum_delta_products(task, crossed=True)
        factors = yield Solve(lambda device: compute_factors(products, task))

        def map_block(block: Block) -> torch.Tensor:
            parts = []
            for part in rows_of(block, width):
                pairs = zip(deltas_of(part, weights), factors, strict=True)
                merged = add_in_order([delta @ factor for delta, factor in pairs if factor is not None])
                parts.append((part[0].double() + merged * scale).to(part.dtype).reshape(-1))
            return torch.cat(parts)

        return Map(map_block)

    return Method(
        base="required",
        models=(1, None),
        steps=steps,
        grain=grain_of_rows,
        costs=costs_of_matrices(
            lambda task: _product_operations(task, decompositions * _EIGH), lambda task: _held_bytes(task, workspaces)
        ),
        **fields,
    )


def _knots_sides(task: TensorTask) -> tuple[int, int]:
    """Return the shorter and longer side of all task matrices side by side."""
    models, (out, width) = len(task.per_input) - 1, task.shape
    return min(out, models * width), max(out, models * width)


def _knots_operations(task: TensorTask) -> float:
    shorter, longer = _knots_sides(task)
    return 2.0 * shorter**2 * longer * 2.5 + _EIGH * shorter**3


def _knots_held_bytes(task: TensorTask) -> int:
    """Return the bytes of the task matrices, their stacked and projected copies, the products and the directions."""
    shorter, longer = _knots_sides(task)
    return 4 * (3 * shorter * longer + 8 * task.shape[0] * task.shape[1]) + 8 * (
        4 * shorter**2 + shorter * task.shape[0]
    )


METHODS = (
    Method(
        name="knots",
        formula="[d_1 … d_k] = U S [V_1' … V_k']; X = b + λ U · TIES(S V_i')",
        summary="TIES in the directions that all task matrices share, also for adapters (experimental)",
        paper="KnOTS, Stoica et al. 2025, https://arxiv.org/abs/2410.19735",
        base="required",
        models=(1, None),
        parameters=(_WEIGHT, _DENSITY, LAMBDA),
        steps=_knots,
        grain=grain_of_rows,
        costs=costs_of_matrices(_knots_operations, _knots_held_bytes),
        traits=Traits(adapters="products"),
    ),
    _method(
        _tsv_factors,
        decompositions=4,
        workspaces=9,
        name="tsv_m",
        formula="the min(out, in) / k largest singular directions of each task matrix, orthogonalized together "
        "and added",
        summary="Sum of the leading singular directions of each task matrix, made orthogonal to those of the others"
        " (experimental)",
        paper="Task Singular Vectors, Gargiulo et al. 2025, https://arxiv.org/abs/2412.00081",
        parameters=(_WEIGHT, LAMBDA),
    ),
    _method(
        _svc_factors,
        decompositions=1,
        workspaces=4,
        name="svc",
        summary="Sum of the task matrices, with each direction shrunk as far as the models agree on it (experimental)",
        paper="Singular value calibration, 2026, https://arxiv.org/abs/2602.05536",
        parameters=(_WEIGHT, _ALPHA, _MERGED, LAMBDA),
        check=_check_merged,
    ),
)

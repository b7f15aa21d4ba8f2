"""Average tensors by their angles: SLERP, NuSLERP, multi-SLERP, the Karcher mean and Model Stock.

A tensor is one vector. NuSLERP and Model Stock can average rows or columns instead. All results are linear combinations
of the inputs, and the coefficients for whole tensors follow from the Gram matrix (see :mod:`.combination`).

Model Stock moves from the base towards the average of the models, further if their changes are similar. With the
offsets ``o_i = x_i - b`` of ``N`` models and the mean cosine ``c`` of all pairs of offsets,
``t = N c / (1 + (N - 1) c)`` and ``out = b + t * mean(o_i)``. Jang et al. 2024, https://arxiv.org/abs/2403.19522.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.combination import check_weight_sum, combine, gram
from mergegate.merge_core.methods.contract import (
    GRAIN,
    REQUIRED,
    Block,
    Costs,
    Map,
    Method,
    Parameter,
    Steps,
    TensorTask,
    Traits,
    Values,
    add_in_order,
    fold_sums,
    row_length,
    torch,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

# Above this cosine, two vectors count as parallel and SLERP interpolates linearly.
_PARALLEL = 0.9995
# NuSLERP interpolates linearly if 1 - cos**2 is not distinguishable from 0.
_NO_ANGLE = 1e-16
# Rows per grain if vectors are columns. Each partial sum has the size of one row, so this bounds their memory.
_COLUMN_ROWS = 128
# Lower bound of Model Stock for a product of norms, so that tiny tensors move less.
_LEAST_NORMS = 1e-6


def _slerp(task: TensorTask) -> Steps:
    """Return the map to ``slerp(...slerp(slerp(x_0, x_1), x_2)...)``, computed on the coefficients of the inputs."""
    matrix, t = (yield gram(len(task.per_input))), float(task.shared["t"])
    position = np.zeros(len(matrix))
    position[0] = 1.0
    for index in range(1, len(matrix)):
        target = np.eye(len(matrix))[index]
        norm_a, norm_b = _norm(matrix, position), _norm(matrix, target)
        divisor = (norm_a if norm_a > 1e-8 else 1.0) * (norm_b if norm_b > 1e-8 else 1.0)
        cosine = float(np.clip(position @ matrix @ target / divisor, -1.0, 1.0))
        if abs(cosine) > _PARALLEL:
            near, far = 1.0 - t, t
        else:
            angle = math.acos(cosine)
            near, far = math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
        position = near * position + far * target
    return combine(position.tolist())


def _nuslerp(task: TensorTask) -> Steps:
    first, second = task.model_values("weight")
    t = second / (first + second) if abs(first + second) >= 1e-6 else 0.5
    if task.shared["nuslerp_flatten"]:
        matrix = yield gram(2, about_base=task.has_base)
        near, far = nuslerp_coefficients(matrix[0, 0], matrix[1, 1], matrix[0, 1], t=t)
        return combine([float(near), float(far)], about_base=task.has_base)
    if not _by_columns(task.shape, task.shared):

        def map_rows(block: Block) -> torch.Tensor:
            first, second = block.grains(_vectors(block, task))
            a, b = first.double(), second.double()
            numbers = [value.cpu().numpy() for value in ((a * a).sum(-1), (b * b).sum(-1), (a * b).sum(-1))]
            scales = [torch.from_numpy(c).to(first).unsqueeze(-1) for c in nuslerp_coefficients(*numbers, t=t)]
            return _add_base(block, task, (first * scales[0] + second * scales[1]).flatten())

        return Map(map_rows)
    width = task.numel // task.shape[0]

    def products(block: Block) -> torch.Tensor:
        first_vector, second_vector = _vectors(block, task).double()
        pairs = torch.stack((first_vector * first_vector, second_vector * second_vector, first_vector * second_vector))
        # [3, grains, rows, columns] -> [grains, 3, columns]
        return block.grains(pairs).reshape(3, -1, block.grain // width, width).sum(-2).movedim(1, 0)

    near, far = nuslerp_coefficients(*(yield fold_sums(products)), t=t)

    def map_block(block: Block) -> torch.Tensor:
        first_vector, second_vector = (vector.reshape(-1, width) for vector in _vectors(block, task))
        scales = [torch.from_numpy(np.asarray(c)).to(first_vector) for c in (near, far)]
        return _add_base(block, task, (first_vector * scales[0] + second_vector * scales[1]).flatten())

    return Map(map_block)


def nuslerp_coefficients(norm_a: Any, norm_b: Any, dot: Any, *, t: float) -> tuple[Any, Any]:
    """Return the coefficients of vectors a and b, from their squared norms and dot product (numbers or arrays)."""
    cosine = np.clip(dot / (np.maximum(np.sqrt(norm_a), 1e-7) * np.maximum(np.sqrt(norm_b), 1e-7)), -1.0, 1.0)
    is_parallel = 1.0 - cosine**2 <= _NO_ANGLE
    angle = np.where(is_parallel, math.pi / 2, np.arccos(cosine))
    near, far = np.sin((1.0 - t) * angle) / np.sin(angle), np.sin(t * angle) / np.sin(angle)
    return np.where(is_parallel, 1.0 - t, near), np.where(is_parallel, t, far)


def _vectors(block: Block, task: TensorTask) -> torch.Tensor:
    return block.deltas() if task.has_base else block.inputs


def _add_base(block: Block, task: TensorTask, vector: torch.Tensor) -> torch.Tensor:
    return block.base + vector if task.has_base else vector


def _by_columns(shape: tuple[int, ...], shared_values: Values) -> bool:
    return bool(shared_values["nuslerp_row_wise"]) and len(shape) > 1


def _multislerp(task: TensorTask) -> Steps:
    """Move the mean direction of the unit vectors along the weighted tangent, and scale it by the mean norm."""
    weights, eps = np.array(task.model_values("weight")), float(task.shared["eps"])
    if len(weights) == 1:
        return combine([0.0, 1.0] if task.has_base else [1.0])
    matrix = yield gram(len(weights), about_base=task.has_base)
    if task.shared["normalize_weights"]:
        weights = weights / weights.sum()
    norms = np.sqrt(np.diag(matrix))
    inverse = 1.0 / (norms + eps)
    units = matrix * np.outer(inverse, inverse)
    length = _norm(units, weights)
    if length < eps and len(weights) == 2:
        return combine(weights.tolist(), about_base=task.has_base)
    if length < eps:
        raise InvalidInput(
            task.name,
            found="task vectors or weights that cancel out",
            expected="vectors with a mean direction",
            remedy="change the weights, or use another method",
        )
    mean = weights / length
    tangent = weights - float(weights @ units @ mean) * mean
    angle = _norm(units, tangent) + eps
    direction = math.cos(angle) * mean + math.sin(angle) / angle * tangent
    return combine((direction * inverse * float(weights @ norms)).tolist(), about_base=task.has_base)


def _karcher(task: TensorTask) -> Steps:
    """Find the point on the sphere with the smallest sum of squared angles to all inputs.

    Iterations follow the mean tangent until a step is shorter than ``tol``.
    """
    count, tol = len(task.per_input), float(task.shared["tol"])
    if count == 1:
        return combine([1.0])
    matrix = yield gram(count)
    norms = np.sqrt(np.diag(matrix))
    valid = norms > tol
    if not valid.any():
        return combine([0.0] * count)
    inverse = np.where(valid, 1.0 / np.where(valid, norms, 1.0), 0.0)
    units = matrix * np.outer(inverse, inverse)
    alphas = valid / valid.sum()
    length = _norm(units, alphas)
    mean = alphas / length if length >= tol else np.eye(count)[int(valid.argmax())]
    for _ in range(int(task.shared["max_iter"])):
        cosines = np.clip(units @ mean, -1.0, 1.0)
        angles = np.arccos(cosines)
        moving = valid & (angles >= tol)
        # An angle of pi has no direction to move in, and dividing by its sine would only amplify rounding errors.
        pull = np.where(moving, alphas * angles / np.maximum(np.sin(angles), 1e-12), 0.0)
        tangent = pull - float(pull @ cosines) * mean
        step = _norm(units, tangent)
        if step < tol:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
        mean = mean / _norm(units, mean)
    return combine((mean * inverse * norms.mean()).tolist())


def _norm(matrix: Matrix, coefficients: Matrix) -> float:
    # Rounding can leave a tiny negative number if the true result is zero.
    return math.sqrt(max(float(coefficients @ matrix @ coefficients), 0.0))


def _gram_folds(task: TensorTask) -> int:
    """Return the number of fold passes: 1 for the Gram matrix, or 0 for a single model."""
    return 1 if len(task.model_seeds) > 1 else 0


def _model_stock(task: TensorTask) -> Steps:
    count = len(task.per_input) - 1
    if task.shared["filter_wise"]:

        def map_block(block: Block) -> torch.Tensor:
            offsets = block.grains(block.deltas())
            wide = offsets.double()
            products = {
                (i, j): (wide[i] * wide[j]).sum(-1).cpu().numpy() for i in range(count) for j in range(i, count)
            }
            share = torch.from_numpy(np.asarray(ratio(products, count)) / count).to(offsets)
            return block.base + (add_in_order(list(offsets)) * share.unsqueeze(-1)).flatten()

        return Map(map_block)
    matrix = yield gram(count, about_base=True)
    share = float(ratio({(i, j): matrix[i, j] for i in range(count) for j in range(i, count)}, count))
    return combine([share / count] * count, about_base=True)


def ratio(products: dict[tuple[int, int], Any], count: int) -> Any:
    """Return ``t`` from the products of each pair of offsets ``i <= j``, which may be numbers or arrays."""
    if count < 2:
        return np.ones_like(products[0, 0])
    norms = [np.sqrt(products[i, i]) for i in range(count)]
    cosines = [
        np.clip(products[i, j] / np.maximum(norms[i] * norms[j], _LEAST_NORMS), -1.0, 1.0)
        for i, j in combinations(range(count), 2)
    ]
    cosine = sum(cosines) / len(cosines)
    divisor = 1.0 + (count - 1) * cosine
    degenerate = np.abs(divisor) < 1e-6
    return np.where(degenerate, 0.0, count * cosine / np.where(degenerate, 1.0, divisor))


METHODS = (
    Method(
        name="slerp",
        formula="x = sin((1 - t) θ) / sin θ · x_1 + sin(t θ) / sin θ · x_2",
        summary="Spherical interpolation from the first model (or the base) to the next ones",
        paper="Shoemake 1985, https://doi.org/10.1145/325334.325242",
        base="donor",
        models=(2, None),
        parameters=(
            Parameter(
                "t", "float", "shared", REQUIRED, "position from 0, the first model or base, to 1, the next model"
            ),
        ),
        steps=_slerp,
        single_input="copy",
        costs=Costs(map=0.4, fold=1.0, folds=_gram_folds),
    ),
    Method(
        name="nuslerp",
        summary="Spherical interpolation of two models, or of their task vectors, by weights",
        paper="Shoemake 1985, https://doi.org/10.1145/325334.325242",
        base="optional",
        models=(2, 2),
        parameters=(
            Parameter("weight", "float", "non_base", REQUIRED, "weight of each model"),
            Parameter("nuslerp_flatten", "bool", "shared", True, "treat the whole tensor as one vector"),
            Parameter(
                "nuslerp_row_wise", "bool", "shared", False, "if not flattened, use vectors along the first dimension"
            ),
        ),
        steps=_nuslerp,
        grain=lambda shape, shared: (
            GRAIN
            if shared["nuslerp_flatten"]
            else max(1, _COLUMN_ROWS * math.prod(shape[1:]))
            if _by_columns(shape, shared)
            else row_length(shape, shared)
        ),
        single_input="copy",
        costs=Costs(
            map=0.4,
            fold=1.0,
            folds=lambda task: int(task.shared["nuslerp_flatten"] or _by_columns(task.shape, task.shared)),
        ),
        traits=Traits(adds_up=True),
    ),
    Method(
        name="multislerp",
        summary="Spherical weighted mean of any number of models, in the tangent space at their mean",
        paper="Goddard 2024, https://goddard.blog/posts/multislerp-wow-what-a-cool-idea",
        base="optional",
        models=(1, None),
        parameters=(
            Parameter("weight", "float", "non_base", REQUIRED, "weight of each model"),
            Parameter("normalize_weights", "bool", "shared", True, "divide by the sum of the weights"),
            Parameter("eps", "float", "shared", 1e-8, "minimum length of a mean direction", minimum=0.0),
        ),
        steps=_multislerp,
        check=check_weight_sum("normalize_weights"),
        costs=Costs(map=0.4, fold=1.9, folds=_gram_folds),
        traits=Traits(adds_up=True),
    ),
    Method(
        name="karcher",
        summary="The point on the sphere nearest to all models (Riemannian center of mass)",
        paper="Karcher 1977, https://doi.org/10.1002/cpa.3160300502",
        base="ordinary",
        models=(1, None),
        parameters=(
            Parameter("max_iter", "int", "shared", 10, "maximum number of steps", minimum=1),
            Parameter("tol", "float", "shared", 1e-5, "length of a step at which to stop", minimum=0.0),
        ),
        steps=_karcher,
        costs=Costs(map=0.5, fold=1.8, folds=_gram_folds),
        traits=Traits(adds_up=True),
    ),
)

MODEL_STOCK = Method(
    name="model_stock",
    summary="From the base towards the average of the models, as far as their angles allow",
    paper="Model Stock, Jang et al. 2024, https://arxiv.org/abs/2403.19522",
    base="required",
    models=(2, None),
    parameters=(Parameter("filter_wise", "bool", "shared", False, "an angle for each row instead of each tensor"),),
    steps=_model_stock,
    grain=lambda shape, shared: row_length(shape, shared) if shared["filter_wise"] else GRAIN,
    single_input="copy",
    costs=Costs(map=0.6, fold=1.4, folds=lambda task: 0 if task.shared["filter_wise"] else 1),
)

"""Implement the methods that sparsify task vectors, weight them, elect signs, and add them to the base.

The task vector ``d_i = x_i - b`` of each model is sparsified (see :mod:`.sparsify`) and weighted: ``v_i = w_i d_i``.
With a sign consensus, the models elect a sign for each element, and only contributions with that sign count. Without
one, all contributions count, except that ``localize_and_stitch`` does not count dropped elements. Then

    out = b + lambda * sum v_i / divisor

The divisor is 1, or the sum of the weights that counted if ``normalize`` is set.
Task Arithmetic: Ilharco et al. 2023; TIES: Yadav et al. 2023; DARE: Yu et al. 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.contract import (
    REQUIRED,
    ConflictRemedy,
    Costs,
    Map,
    Method,
    Parameter,
    Steps,
    StoredBlock,
    TensorTask,
    Traits,
    Values,
    add_in_order,
    load_kernels,
    row_length,
)
from mergegate.merge_core.methods.sparsify import (
    Folds,
    folds_at_random,
    folds_by_magnitude,
    keep_all,
    keep_at_random,
    keep_at_random_by_rank,
    keep_largest,
    keep_medium,
)

if TYPE_CHECKING:
    import torch

# Parameters of every method on task vectors.
WEIGHT = Parameter("weight", "float", "non_base", REQUIRED, "factor of each task vector")
LAMBDA = Parameter("lambda", "float", "shared", 1.0, "factor of the merged task vector")

# Vote that stands for the value of the recipe's parameter ``consensus``.
_FROM_RECIPE = "consensus"
# A smaller sum of weights is not used as a divisor.
_NO_DIVISOR = 1e-8


@dataclass(frozen=True)
class VectorCombination:
    """Settings for the combination of several task vectors.

    Args:
        weights: One weight per model.
        vote: How to elect the sign of an element. ``sum``: the sign of the weighted sum. ``count``: the sign of most
            contributions. ``kept``: no election; every nonzero contribution counts. None: no election; zeros count too.
        normalize: Whether to divide by the sum of the weights that counted.
        scale: Value of the parameter ``lambda``.
    """

    weights: tuple[float, ...]
    vote: str | None
    normalize: bool
    scale: float

    @property
    def divisor(self) -> float:
        """Common divisor of all elements, or 1 if there is none because of a vote."""
        total = sum(self.weights)
        return total if self.normalize and self.vote is None and abs(total) >= _NO_DIVISOR else 1.0


def mix(mixing: VectorCombination, base: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """Add the combined task vectors ``[models, n]``, which are already sparsified, to the base ``[n]``."""
    import torch

    weighted = [delta * weight for delta, weight in zip(deltas, mixing.weights, strict=True)]
    if mixing.vote is None:
        total = add_in_order(weighted) / mixing.divisor
    else:
        # Zeros have no sign. They neither vote nor count.
        counted = [value != 0 for value in weighted]
        if mixing.vote != "kept":
            votes = weighted if mixing.vote == "sum" else [torch.sign(value) for value in weighted]
            positive = add_in_order(votes) >= 0
            counted = [torch.where(positive, value > 0, value < 0) for value in weighted]
        total = add_in_order([torch.where(counts, value, 0.0) for counts, value in zip(counted, weighted, strict=True)])
        if mixing.normalize:
            # Convert first: in torch, a boolean times a number is float32, regardless of the number's own precision.
            divisor = add_in_order(
                [counts.to(base.dtype) * weight for counts, weight in zip(counted, mixing.weights, strict=True)]
            )
            total = total / torch.where(divisor == 0, 1.0, divisor)
    return base + total * mixing.scale


def _check_weights(shared_values: Values, per_input: Sequence[Values], location: str) -> None:
    for values in per_input:
        epsilon, density = values.get("epsilon"), values.get("density", 1.0)
        if epsilon is not None and 0 < density < 1 and not (density - epsilon > 0 and density + epsilon < 1):
            raise InvalidInput(
                location,
                found=f"density {density:g} with epsilon {epsilon:g}",
                expected="keep probabilities inside (0, 1): density - epsilon > 0 and density + epsilon < 1",
                remedy="lower epsilon",
            )


def _parameters(
    *,
    normalize: bool,
    rescale: bool,
    vote: str | None = None,
    density: float | None = 1.0,
    extra: Sequence[Parameter] = (),
) -> tuple[Parameter, ...]:
    density_summary = "share of each task vector's elements to keep"
    ignored = "accepted for compatibility; no effect"
    parameters = [
        WEIGHT,
        Parameter(
            "density",
            "float",
            "non_base",
            1.0 if density is None else density,
            density_summary if density else ignored,
            0.0,
            1.0,
        ),
        *extra,
        Parameter("normalize", "bool", "shared", normalize, "divide by the weights that count"),
        Parameter(
            "rescale",
            "switch",
            "shared",
            rescale,
            "after dropping elements, restore the L1 norm (true) or divide by the density",
            choices=("density",),
        ),
        LAMBDA,
        Parameter("int8_mask", "bool", "shared", False, ignored),
    ]
    if vote == _FROM_RECIPE:
        parameters.append(
            Parameter(
                "consensus",
                "choice",
                "shared",
                "sum",
                "sign by the weighted sum, or by the number of models for each sign",
                choices=("sum", "count"),
            )
        )
    return tuple(parameters)


_ARITHMETIC = "Task Arithmetic, Ilharco et al. 2023, https://arxiv.org/abs/2212.04089"
_TIES = "TIES-Merging, Yadav et al. 2023, https://arxiv.org/abs/2306.01708"
_DARE = "DARE, Yu et al. 2024, https://arxiv.org/abs/2311.03099"
_DELLA = "DELLA-Merging, Deep et al. 2024, https://arxiv.org/abs/2406.11617"
_BREADCRUMBS = "Model Breadcrumbs, Davari and Belilovsky 2023, https://arxiv.org/abs/2312.06795"
_GAMMA = (Parameter("gamma", "float", "non_base", 0.01, "share of the largest elements to drop as outliers", 0.0, 1.0),)
_EPSILON = (Parameter("epsilon", "float", "non_base", 0.15, "half width of the keep probabilities", 0.0, 1.0),)


def _method(sparsify: Callable[[TensorTask], Folds], vote: str | None, **fields: Any) -> Method:
    """Return a method that sparsifies and combines task vectors. ``fields`` are more fields of :class:`.Method`."""

    def steps(task: TensorTask) -> Steps:
        sparsifier = yield from sparsify(task)
        mixing = VectorCombination(
            weights=tuple(task.model_values("weight")),
            vote=str(task.shared["consensus"]) if vote == _FROM_RECIPE else vote,
            normalize=bool(task.shared["normalize"]),
            scale=float(task.shared["lambda"]),
        )
        mix_arguments = (
            np.asarray(mixing.weights, np.float32),
            (None, "sum", "count", "kept").index(mixing.vote),
            mixing.normalize,
            np.float32(mixing.divisor),
            np.float32(mixing.scale),
            np.array(sparsifier.scales, np.float32),
        )
        kinds, *tables = sparsifier.tables()
        needs_no_table = all(table is None for table in tables)

        def map_stored(block: StoredBlock, out: Any) -> None:
            masks = sparsifier.mask_cache.take(block.start)
            # Pass either the tables or the cached masks, so that numba does not compile code for the other.
            mask_arguments = (*(None for _ in tables), masks) if needs_no_table or masks.size else (*tables, None)
            arguments = (sparsifier.tile(block.grain), *mix_arguments, kinds, *mask_arguments, out)
            load_kernels().task_vectors(block.data, block.rows, block.length, block.start, block.grain, *arguments)

        return Map(lambda block: mix(mixing, block.base, sparsifier.sparsify(block)), map_stored)

    return Method(base="required", models=(1, None), steps=steps, check=_check_weights, **fields)


TASK_ARITHMETIC = _method(
    keep_all,
    None,
    name="task_arithmetic",
    formula="x = b + λ Σ w_i (x_i - b)",
    summary="The base plus a weighted sum of task vectors",
    paper=_ARITHMETIC,
    parameters=_parameters(normalize=False, rescale=False, density=None),
    costs=Costs(map=1.5),
    traits=Traits(adapters="sum", adds_up=True),
)

METHODS = (
    TASK_ARITHMETIC,
    _method(
        keep_largest,
        _FROM_RECIPE,
        name="ties",
        summary="Keep the largest elements of each task vector, elect signs, average what agrees",
        paper=_TIES,
        parameters=_parameters(normalize=True, rescale=False, vote=_FROM_RECIPE),
        costs=Costs(map=2.6, fold=1.2, folds=folds_by_magnitude),
        traits=Traits(
            adapters="products",
            sparse=True,
            conflict_remedy=ConflictRemedy(
                "keeps the largest and lets the stronger sign win", settings={"density": 0.3}, additions={"weight": 1.0}
            ),
            first_draft="keeps the larger half of each difference, lets the signs vote, and adds the rest to the base",
        ),
    ),
    _method(
        keep_at_random,
        None,
        name="dare_linear",
        summary="Drop random elements of each task vector, rescale the rest, add up",
        paper=_DARE,
        parameters=_parameters(normalize=False, rescale=True),
        costs=Costs(map=2.6, fold=2.3, folds=folds_at_random),
        traits=Traits(adapters="products", adds_up=True, sparse=True),
    ),
    _method(
        keep_at_random,
        _FROM_RECIPE,
        name="dare_ties",
        summary="Drop random elements of each task vector, rescale the rest, elect signs, add up what agrees",
        paper=_DARE,
        parameters=_parameters(normalize=False, rescale=True, vote=_FROM_RECIPE),
        costs=Costs(map=2.7, fold=2.3, folds=folds_at_random),
        traits=Traits(adapters="products", sparse=True),
    ),
    _method(
        keep_medium,
        None,
        name="breadcrumbs",
        summary="Drop the smallest elements and the outliers of each task vector, add up the rest",
        paper=_BREADCRUMBS,
        parameters=_parameters(normalize=False, rescale=False, extra=_GAMMA),
        costs=Costs(map=2.8, fold=1.5, folds=folds_by_magnitude),
        traits=Traits(adapters="products", adds_up=True, sparse=True),
    ),
    _method(
        keep_medium,
        _FROM_RECIPE,
        name="breadcrumbs_ties",
        summary="Drop the smallest elements and the outliers of each task vector, elect signs, add up what agrees",
        paper=_BREADCRUMBS,
        parameters=_parameters(normalize=False, rescale=False, extra=_GAMMA, vote=_FROM_RECIPE),
        costs=Costs(map=2.8, fold=1.5, folds=folds_by_magnitude),
        traits=Traits(adapters="products", sparse=True),
    ),
    _method(
        keep_at_random_by_rank,
        _FROM_RECIPE,
        name="della",
        summary="Drop elements at random, the small ones more often, rescale, elect signs, average what agrees",
        paper=_DELLA,
        parameters=_parameters(normalize=True, rescale=True, extra=_EPSILON, vote=_FROM_RECIPE),
        grain=row_length,
        costs=Costs(map=14.8, fold=14.0, folds=folds_at_random),
        traits=Traits(adapters="products", sparse=True),
    ),
    _method(
        keep_at_random_by_rank,
        None,
        name="della_linear",
        summary="Drop elements at random, the small ones more often, rescale, add up",
        paper=_DELLA,
        parameters=_parameters(normalize=False, rescale=True, extra=_EPSILON),
        grain=row_length,
        costs=Costs(map=14.8, fold=14.0, folds=folds_at_random),
        traits=Traits(adapters="products", adds_up=True, sparse=True),
    ),
    _method(
        keep_largest,
        "kept",
        name="localize_and_stitch",
        formula="x = b + λ · mean of the density largest elements of each x_i - b, else b",
        summary="Keep the largest elements of each task vector, average where they overlap, keep the base elsewhere",
        paper="Localize-and-Stitch (without data), He et al. 2024, https://arxiv.org/abs/2408.13656",
        parameters=_parameters(density=0.1, normalize=True, rescale=False),
        costs=Costs(map=2.6, fold=1.2, folds=folds_by_magnitude),
        traits=Traits(adapters="products", sparse=True),
    ),
)

"""Implement the methods that sparsify task vectors, weight them, elect signs, and add them to the base.

The task vector ``d_i = x_i - b`` of each model is sparsified (see :mod:`.sparsify`) and weighted: ``v_i = w_i d_i``.
With a sign consensus, the models elect a sign for each element, and only contributions with that sign count. Without
one, all contributions count, except that ``localize_and_stitch`` does not count dropped elements. Then

    out = b + lambda * sum v_i / divisor

The divisor is 1, or the sum of the weights that counted if ``normalize`` is set.
Task Arithmetic: Ilharco et al. 2023; TIES: Yadav et al. 2023; DARE: Yu et al. 2024.

SCE selects the elements that vary most between models, calculates the weights of the models, and erases minority signs.
Of the task vectors ``d_i``, it keeps the positions with the highest variance over the models. ``c_i`` is the share of
model i in the mean squares of all models, and ``E_i`` is 1 where ``d_i`` has the majority sign, else 0:
``out = b + sum c_i d_i E_i / max(sum c_i E_i, 1e-6)``. Wan et al. 2024, https://arxiv.org/abs/2408.07990.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.combination import LAMBDA, WEIGHT
from mergegate.merge_core.methods.contract import (
    GRAIN,
    Block,
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
    fold_sums,
    row_length,
    torch,
)
from mergegate.merge_core.methods.selection import (
    LARGE,
    NOTHING,
    ScoreFunction,
    SelectionRequest,
    SelectionThreshold,
    score_bits,
    select,
    select_passes,
    selection_mask,
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

# Vote that stands for the value of the recipe's parameter ``consensus``.
_FROM_RECIPE = "consensus"
# A smaller sum of weights is not used as a divisor.
_NO_DIVISOR = 1e-8
# If the mean squares add up to less than this, all models of SCE get equal weights. The reference implementation uses
# the same absolute bound.
_NO_SHARES = 1e-6
_LEAST_DIVISOR = 1e-6


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


_DARE = "DARE, Yu et al. 2024, https://arxiv.org/abs/2311.03099"
_DELLA = "DELLA-Merging, Deep et al. 2024, https://arxiv.org/abs/2406.11617"
_BREADCRUMBS = "Model Breadcrumbs, Davari and Belilovsky 2023, https://arxiv.org/abs/2312.06795"
_GAMMA = Parameter("gamma", "float", "non_base", 0.01, "share of the largest elements to drop as outliers", 0.0, 1.0)
_EPSILON = Parameter("epsilon", "float", "non_base", 0.15, "half width of the keep probabilities", 0.0, 1.0)
_CONSENSUS = Parameter(
    _FROM_RECIPE,
    "choice",
    "shared",
    "sum",
    "sign by the weighted sum, or by the number of models for each sign",
    choices=("sum", "count"),
)
# Functions that return the number of fold passes.
_FOLDS: Mapping[Callable[[TensorTask], Folds], Callable[[TensorTask], int]] = {
    keep_all: lambda task: 0,
    keep_largest: folds_by_magnitude,
    keep_medium: folds_by_magnitude,
    keep_at_random: folds_at_random,
    keep_at_random_by_rank: folds_at_random,
}


def _method(
    name: str,
    sparsify: Callable[[TensorTask], Folds],
    vote: str | None,
    *,
    costs: tuple[float, float],
    normalize: bool = False,
    rescale: bool = False,
    density: float = 1.0,
    extra: tuple[Parameter, ...] = (),
    traits: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> Method:
    """Return a method that combines the results of ``sparsify`` by ``vote`` (see :class:`VectorCombination`).

    ``normalize``, ``rescale`` and ``density`` are the defaults of these parameters, and ``extra`` are more parameters.
    ``costs`` are the units of the map and of a fold pass. ``traits`` and ``fields`` are more fields of
    :class:`.Traits` and :class:`.Method`.
    """
    ignored = "accepted for compatibility; no effect"
    is_sparse = sparsify is not keep_all
    density_summary = "share of each task vector's elements to keep" if is_sparse else ignored
    rescale_summary = "after dropping elements, restore the L1 norm (true) or divide by the density"
    parameters = (
        WEIGHT,
        Parameter("density", "float", "non_base", density, density_summary, 0.0, 1.0),
        *extra,
        Parameter("normalize", "bool", "shared", normalize, "divide by the weights that count"),
        Parameter("rescale", "switch", "shared", rescale, rescale_summary, choices=("density",)),
        LAMBDA,
        Parameter("int8_mask", "bool", "shared", False, ignored),
        *((_CONSENSUS,) if vote == _FROM_RECIPE else ()),
    )

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
            block.run("task_vectors", block.start, block.grain, *arguments)

        return Map(lambda block: mix(mixing, block.base, sparsifier.sparsify(block)), map_stored)

    return Method(
        name=name,
        base="required",
        models=(1, None),
        parameters=parameters,
        steps=steps,
        grain=row_length if sparsify is keep_at_random_by_rank else lambda shape, shared: GRAIN,
        check=_check_weights,
        costs=Costs(*costs, folds=_FOLDS[sparsify]),
        traits=Traits(**{"adapters": "products", "adds_up": vote is None, "sparse": is_sparse, **traits}),
        **fields,
    )


def _sce(task: TensorTask) -> Steps:
    share = float(task.shared["select_topk"])
    threshold: SelectionThreshold | None = None
    if share < 1:
        scores = ScoreFunction(
            lambda block: _variance(block).unsqueeze(0), task.dtype, lambda block: block.run("variances")
        )
        (threshold,) = yield from select(scores, [SelectionRequest(0, None, of_positive=share)], task.numel)
        if threshold is NOTHING:
            return Map(lambda block: block.base)

    def keep_selected(block: Block) -> torch.Tensor:
        deltas = block.deltas()
        if threshold is None:
            return deltas
        return torch.where(selection_mask(threshold, score_bits(_variance(block)), block), deltas, 0.0)

    table = np.array(
        (threshold.key, threshold.quota, threshold.tied, threshold.stride) if threshold else (-1, 0, 0, 1), np.int64
    )
    before = threshold.before if threshold else np.empty(0, np.int64)
    squares = yield fold_sums(
        lambda block: block.grain_sums(keep_selected(block).double() ** 2),
        lambda block: block.run("energies", block.start, block.grain, table, before),
    )
    means = [float(value) / task.numel for value in squares]
    total = sum(means)
    weights = [mean / total if total >= _NO_SHARES else 1 / len(means) for mean in means]

    def map_block(block: Block) -> torch.Tensor:
        deltas = keep_selected(block)
        positive = add_in_order(list(deltas)) >= 0
        merged, divisor = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
        for delta, weight in zip(deltas, weights, strict=True):
            agrees = torch.where(positive, delta > 0, delta < 0)
            merged = merged + torch.where(agrees, delta * weight, 0.0)
            divisor = divisor + agrees.to(delta.dtype) * weight
        return block.base + merged / divisor.clamp(min=_LEAST_DIVISOR)

    def map_stored(block: StoredBlock, out: Any) -> None:
        shares, least = np.array(weights, np.float32), np.float32(_LEAST_DIVISOR)
        block.run("sce", block.start, block.grain, table, before, shares, least, out)

    return Map(map_block, map_stored)


def _variance(block: Block) -> torch.Tensor:
    """Return the population variance of the task vectors at each position: ``[elements]``."""
    deltas = block.deltas()
    mean = add_in_order(list(deltas)) / len(deltas)
    return add_in_order([(delta - mean) ** 2 for delta in deltas]) / len(deltas)


TASK_ARITHMETIC = _method(
    "task_arithmetic",
    keep_all,
    None,
    costs=(1.5, 0.0),
    traits={"adapters": "sum"},
    formula="x = b + λ Σ w_i (x_i - b)",
    summary="The base plus a weighted sum of task vectors",
    paper="Task Arithmetic, Ilharco et al. 2023, https://arxiv.org/abs/2212.04089",
)

METHODS = (
    TASK_ARITHMETIC,
    _method(
        "ties",
        keep_largest,
        _FROM_RECIPE,
        normalize=True,
        costs=(2.6, 1.2),
        traits={
            "conflict_remedy": ConflictRemedy(
                "keeps the largest and lets the stronger sign win", settings={"density": 0.3}, additions={"weight": 1.0}
            ),
            "first_draft": "keeps the larger half of each difference, lets the signs vote, and adds the rest to the "
            "base",
        },
        summary="Keep the largest elements of each task vector, elect signs, average what agrees",
        paper="TIES-Merging, Yadav et al. 2023, https://arxiv.org/abs/2306.01708",
    ),
    _method(
        "dare_linear",
        keep_at_random,
        None,
        rescale=True,
        costs=(2.6, 2.3),
        summary="Drop random elements of each task vector, rescale the rest, add up",
        paper=_DARE,
    ),
    _method(
        "dare_ties",
        keep_at_random,
        _FROM_RECIPE,
        rescale=True,
        costs=(2.7, 2.3),
        summary="Drop random elements of each task vector, rescale the rest, elect signs, add up what agrees",
        paper=_DARE,
    ),
    _method(
        "breadcrumbs",
        keep_medium,
        None,
        costs=(2.8, 1.5),
        extra=(_GAMMA,),
        summary="Drop the smallest elements and the outliers of each task vector, add up the rest",
        paper=_BREADCRUMBS,
    ),
    _method(
        "breadcrumbs_ties",
        keep_medium,
        _FROM_RECIPE,
        costs=(2.8, 1.5),
        extra=(_GAMMA,),
        summary="Drop the smallest elements and the outliers of each task vector, elect signs, add up what agrees",
        paper=_BREADCRUMBS,
    ),
    _method(
        "della",
        keep_at_random_by_rank,
        _FROM_RECIPE,
        normalize=True,
        rescale=True,
        costs=(14.8, 14.0),
        extra=(_EPSILON,),
        summary="Drop elements at random, the small ones more often, rescale, elect signs, average what agrees",
        paper=_DELLA,
    ),
    _method(
        "della_linear",
        keep_at_random_by_rank,
        None,
        rescale=True,
        costs=(14.8, 14.0),
        extra=(_EPSILON,),
        summary="Drop elements at random, the small ones more often, rescale, add up",
        paper=_DELLA,
    ),
    _method(
        "localize_and_stitch",
        keep_largest,
        "kept",
        normalize=True,
        costs=(2.6, 1.2),
        density=0.1,
        formula="x = b + λ · mean of the density largest elements of each x_i - b, else b",
        summary="Keep the largest elements of each task vector, average where they overlap, keep the base elsewhere",
        paper="Localize-and-Stitch (without data), He et al. 2024, https://arxiv.org/abs/2408.13656",
    ),
)

SCE = Method(
    name="sce",
    summary="Keep what varies most between models, weigh models by their energy, erase minority signs",
    paper="SCE (FuseChat), Wan et al. 2024, https://arxiv.org/abs/2408.07990",
    base="required",
    models=(1, None),
    parameters=(
        Parameter("select_topk", "float", "shared", 1.0, "share of the varying elements that is kept", 0.0, 1.0),
        Parameter("int8_mask", "bool", "shared", False, "accepted for compatibility, has no effect"),
    ),
    steps=_sce,
    costs=Costs(
        map=2.3,
        fold=2.0,
        # The passes count the varying elements, select among them, and measure the energy of each model.
        folds=lambda task: (
            1 if task.shared["select_topk"] >= 1 else 1 + select_passes(task.dtype, task.numel) + (task.numel < LARGE)
        ),
    ),
)

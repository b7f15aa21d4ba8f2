"""Sparsify task vectors: keep elements by magnitude, at random, or both, and rescale them.

Each ``keep_*`` function runs the necessary fold passes and returns a :class:`Sparsifier`. At density 1, all of them
leave the task vector unchanged.

The parameter ``rescale`` sets a factor for the kept elements of a tensor. ``true``: ``sum|d| / sum|kept d|``, or 1 if
either sum is below 1e-7. ``density``: 1 / density, as in the DARE paper. ``false``: 1.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mergegate.merge_core.methods.contract import Block, Fold, StoredBlock, TensorTask, fold_sums, load_kernels, torch
from mergegate.merge_core.methods.masks import MaskCache, mask_words, threshold
from mergegate.merge_core.methods.selection import (
    ScoreFunction,
    SelectionRequest,
    SelectionThreshold,
    score_bits,
    select,
    select_passes,
    selection_mask,
)

# If an L1 norm is below this, elements are not rescaled.
_NO_NORM = 1e-7


@dataclass(frozen=True)
class KeepAll:
    """Rule that keeps every element."""


@dataclass(frozen=True)
class KeepNone:
    """Rule that drops every element."""


@dataclass(frozen=True)
class MagnitudeWindow:
    """Rule that keeps the elements whose magnitudes ``low`` selects and ``high`` does not. None selects nothing."""

    low: SelectionThreshold
    high: SelectionThreshold | None = None


@dataclass(frozen=True)
class KeepAtRandom:
    """Rule that keeps the elements whose random 32-bit word (:func:`mask_words`) is below ``limit``."""

    limit: int
    key: tuple[int, int]


@dataclass(frozen=True)
class KeepByRank:
    """Rule that keeps elements at random. The probability rises with the magnitude's rank in its row.

    It is ``least`` for the smallest and ``most`` for the largest element of a row.
    """

    least: float
    most: float
    key: tuple[int, int]


SparsifyRule: TypeAlias = KeepAll | KeepNone | MagnitudeWindow | KeepAtRandom | KeepByRank
# The index of a rule is its number in the fused kernels.
_KINDS = (KeepAll, KeepNone, MagnitudeWindow, KeepAtRandom, KeepByRank)


@dataclass(frozen=True)
class Sparsifier:
    """A rule and a factor for the task vector of each model, and cached masks of some blocks."""

    rules: tuple[SparsifyRule, ...]
    scales: tuple[float, ...]
    mask_cache: MaskCache

    def sparsify(self, block: Block) -> torch.Tensor:
        """Return the sparsified and rescaled task vectors of a block: ``[models, elements]``."""
        rows = [
            apply_rule(rule, row, block) * scale if scale != 1.0 else apply_rule(rule, row, block)
            for rule, row, scale in zip(self.rules, block.deltas(), self.scales, strict=True)
        ]
        return torch.stack(rows)

    def tables(self) -> tuple[Any, ...]:
        """Return the rules as tables for the fused kernels. Numba does not compile the code for tables that are None.

        * ``kinds [models]``: indices in :data:`_KINDS`.
        * ``cuts [models, 2, 4]``: key, quota, tied and stride of the low and high threshold of a magnitude window.
        * ``before [models, 2, grains]``: number of ties before each grain, for each of these thresholds.
        * ``chances [models, 3]``: limit and key (two words) for the random words.
        * ``spans [models, 2]``: smallest and largest probability by rank.
        """
        models = len(self.rules)
        kinds = np.array([_KINDS.index(type(rule)) for rule in self.rules], np.int64)
        sides = [(rule.low, rule.high) if isinstance(rule, MagnitudeWindow) else () for rule in self.rules]
        grains = max((len(side.before) for pair in sides for side in pair if side), default=0)
        cuts, before = np.zeros((models, 2, 4), np.int64), np.zeros((models, 2, grains), np.int64)
        chances, spans = np.zeros((models, 3), np.int64), np.zeros((models, 2), np.float64)
        for model, rule in enumerate(self.rules):
            if isinstance(rule, KeepAtRandom):
                chances[model] = (rule.limit, *rule.key)
            if isinstance(rule, KeepByRank):
                chances[model], spans[model] = (0, *rule.key), (rule.least, rule.most)
            for side, cut in enumerate(sides[model]):
                # A quota of 0 selects nothing; the largest key is above every score.
                cuts[model, side] = (cut.key, cut.quota, cut.tied, cut.stride) if cut else (2**31, 0, 0, 1)
                if cut and len(cut.before):
                    before[model, side] = cut.before
        types = set(map(type, self.rules))
        return (
            kinds,
            cuts if MagnitudeWindow in types else None,
            before if MagnitudeWindow in types else None,
            chances if types & {KeepAtRandom, KeepByRank} else None,
            spans if KeepByRank in types else None,
        )

    def tile(self, grain: int) -> int:
        """Return the number of elements that a fused kernel processes at a time: a whole row if a rule uses ranks."""
        tile: int = load_kernels().TILE
        return grain if any(isinstance(rule, KeepByRank) for rule in self.rules) or grain % tile else tile


Folds: TypeAlias = Generator[Fold, Any, Sparsifier]


def apply_rule(rule: SparsifyRule, delta: torch.Tensor, block: Block) -> torch.Tensor:
    """Return a task vector ``[n]`` with zeros in place of the elements that ``rule`` drops."""
    match rule:
        case KeepAll():
            return delta
        case KeepNone():
            return torch.zeros_like(delta)
        case MagnitudeWindow(low, high):
            keys = score_bits(delta.abs())
            mask = selection_mask(low, keys, block)
            if high is not None:
                mask &= ~selection_mask(high, keys, block)
        case KeepAtRandom(limit, key):
            mask = mask_words(key, block.start, len(delta), delta.device) < limit
        case KeepByRank(least, most, key):
            # Rank of each element in its row, from 0 (smallest) to 1 (largest). Equal elements rank in element order.
            if block.grain == 1:
                ranks = torch.full_like(delta, 0.5, dtype=torch.float64)
            else:
                order = delta.abs().reshape(-1, block.grain).argsort(dim=-1, stable=True)
                positions = torch.arange(block.grain, device=delta.device).expand_as(order)
                places = torch.empty_like(order).scatter_(-1, order, positions)
                ranks = places.flatten().double() / (block.grain - 1)
            limits = (least + (most - least) * ranks) * 2.0**32
            mask = mask_words(key, block.start, len(delta), delta.device) < limits
    return torch.where(mask, delta, 0.0)


def keep_all(task: TensorTask) -> Folds:
    """Keep every element, regardless of ``density``."""
    count = len(task.model_values("weight"))
    return Sparsifier((KeepAll(),) * count, (1.0,) * count, MaskCache(count))
    yield  # This makes the function a generator.


def keep_largest(task: TensorTask) -> Folds:
    """Keep the ``max(1, int(density * n))`` elements of largest magnitude, or no element at density 0."""
    densities = task.model_values("density")
    counts = [max(1, int(density * task.numel)) for density in densities]
    partial = [model for model, density in enumerate(densities) if 0 < density < 1]
    cuts: list[SelectionThreshold] = []
    if partial and task.numel:
        cuts = yield from select(
            magnitudes(task), [SelectionRequest(model, counts[model]) for model in partial], task.numel
        )
    rules = _plain_rules(densities)
    for model, cut in zip(partial, cuts, strict=False):
        rules[model] = MagnitudeWindow(cut)
    return (yield from _rescale(task, rules))


def keep_medium(task: TensorTask) -> Folds:
    """Drop the ``int(gamma * n)`` largest elements as outliers, and keep the ``int(density * n)`` next largest.

    If there are fewer other elements, the smallest outliers are kept too.
    """
    rules = _plain_rules(task.model_values("density"))
    requests: list[SelectionRequest] = []
    windows: list[tuple[int, int, int | None]] = []
    for model, (density, gamma) in enumerate(
        zip(task.model_values("density"), task.model_values("gamma"), strict=True)
    ):
        kept_count = int(density * task.numel)
        if density >= 1 or kept_count == 0:
            rules[model] = KeepAll() if density >= 1 else KeepNone()
            continue
        smallest = max(0, task.numel - kept_count - int(gamma * task.numel))
        outliers = task.numel - smallest - kept_count
        windows.append((model, len(requests), len(requests) + 1 if outliers else None))
        requests.append(SelectionRequest(model, task.numel - smallest))
        if outliers:
            requests.append(SelectionRequest(model, outliers))
    cuts = (yield from select(magnitudes(task), requests, task.numel)) if requests else []
    for model, low, high in windows:
        rules[model] = MagnitudeWindow(cuts[low], None if high is None else cuts[high])
    return (yield from _rescale(task, rules))


def keep_at_random_by_rank(task: TensorTask) -> Folds:
    """Keep elements at random, with a probability that rises with the rank of the magnitude in its row.

    It is ``density - epsilon`` for the smallest and ``density + epsilon`` for the largest element.
    """
    densities = task.model_values("density")
    rules = _plain_rules(densities)
    for model, (density, epsilon, key) in enumerate(
        zip(densities, task.model_values("epsilon"), task.model_seeds, strict=True)
    ):
        if 0 < density < 1:
            rules[model] = KeepByRank(density - epsilon, density + epsilon, key)
    return (yield from _rescale(task, rules))


def keep_at_random(task: TensorTask) -> Folds:
    """Keep each element with probability ``density``."""
    densities = task.model_values("density")
    rules = _plain_rules(densities)
    for model, (density, key) in enumerate(zip(densities, task.model_seeds, strict=True)):
        if 0 < density < 1:
            rules[model] = KeepAtRandom(threshold(density), key)
    return (yield from _rescale(task, rules))


def folds_at_random(task: TensorTask) -> int:
    """Return the number of fold passes of :func:`keep_at_random` and :func:`keep_at_random_by_rank`."""
    return 1 if _drops_elements(task) and task.shared["rescale"] is True else 0


def folds_by_magnitude(task: TensorTask) -> int:
    """Return the maximum number of fold passes of :func:`keep_largest` and :func:`keep_medium`."""
    return select_passes(task.dtype, task.numel) + folds_at_random(task) if _drops_elements(task) else 0


def _drops_elements(task: TensorTask) -> bool:
    return any(0 < density < 1 for density in task.model_values("density"))


def magnitudes(task: TensorTask) -> ScoreFunction:
    """Return the scores ``|x_i - b|`` for :func:`~.selection.select`, with one stream per model."""
    return ScoreFunction(
        lambda block: block.deltas().abs(), task.dtype, lambda block: block.run("sizes"), are_magnitudes=True
    )


def _plain_rules(densities: Sequence[float]) -> list[SparsifyRule]:
    return [KeepAll() if density >= 1 else KeepNone() for density in densities]


def _rescale(task: TensorTask, rules: Sequence[SparsifyRule]) -> Folds:
    """Return a sparsifier with the factors of ``rescale``. The value ``true`` takes one more pass."""
    mode, densities = task.shared["rescale"], task.model_values("density")
    mask_cache = MaskCache(len(rules))
    plain = Sparsifier(tuple(rules), (1.0,) * len(rules), mask_cache)
    sparse = any(not isinstance(rule, (KeepAll, KeepNone)) for rule in rules)
    if mode is False or not sparse:
        return plain
    if mode == "density":
        scales = [1 / density if 0 < density < 1 else 1.0 for density in densities]
        return Sparsifier(plain.rules, tuple(scales), mask_cache)

    def reduce_block(block: Block) -> torch.Tensor:
        return block.grain_sums(torch.stack((block.deltas().abs(), plain.sparsify(block).abs())))

    tables = plain.tables()

    def reduce_stored(block: StoredBlock) -> Any:
        tile = plain.tile(block.grain)
        masks = mask_cache.begin(block.start, block.length, tile)
        return block.run("masked_norms", block.start, block.grain, tile, *tables, masks)

    norms = yield fold_sums(reduce_block, reduce_stored)
    scales = [
        float(full_norm / kept_norm) if full_norm >= _NO_NORM and kept_norm >= _NO_NORM else 1.0
        for full_norm, kept_norm in zip(*norms, strict=True)
    ]
    return Sparsifier(plain.rules, tuple(scales), mask_cache)

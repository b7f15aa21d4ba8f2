"""Which elements of a task vector are kept, and how the rest is rescaled: by magnitude, at random, or both.

Fold passes find what the rules need (thresholds, norms) and end in a :class:`Sparsifier`: one rule and one factor per
model. All of them leave a task vector as it is at density 1.

``rescale``: true multiplies what is kept by ``sum|d| / sum|kept|`` over the whole tensor (skipped when either sum is
below 1e-7); ``density`` divides it by the density, as the DARE paper does; false leaves it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mergegate.merge_core.methods.contract import Block, Fold, TensorTask, fold_sums
from mergegate.merge_core.methods.mask_cache import MaskCache
from mergegate.merge_core.methods.masks import mask_words, threshold
from mergegate.merge_core.methods.selection import (
    Counters,
    ScoreFunction,
    SelectionRequest,
    SelectionThreshold,
    bits,
    select,
    select_passes,
    taken,
)

if TYPE_CHECKING:
    import torch

# A rescale whose numerator or denominator is below this is not applied.
_NO_NORM = 1e-7


@dataclass(frozen=True)
class KeepAll:
    """Every element is kept."""


@dataclass(frozen=True)
class KeepNone:
    """No element is kept."""


@dataclass(frozen=True)
class MagnitudeWindow:
    """Kept are the elements taken by ``low`` but not by ``high`` (None: nothing is too large)."""

    low: SelectionThreshold
    high: SelectionThreshold | None = None


@dataclass(frozen=True)
class KeepAtRandom:
    """Kept are elements whose random word is below ``limit``."""

    limit: int
    key: tuple[int, int]


@dataclass(frozen=True)
class KeepByRank:
    """Kept with a probability that rises with the rank of the magnitude in its row, from ``least`` to ``most``."""

    least: float
    most: float
    key: tuple[int, int]


SparsifyRule: TypeAlias = KeepAll | KeepNone | MagnitudeWindow | KeepAtRandom | KeepByRank
# As fused kernels number them.
_KINDS = (KeepAll, KeepNone, MagnitudeWindow, KeepAtRandom, KeepByRank)


@dataclass(frozen=True)
class Sparsifier:
    """One rule and one factor per model; what is known of blocks already."""

    rules: tuple[SparsifyRule, ...]
    scales: tuple[float, ...]
    notes: MaskCache

    def of(self, block: Block) -> torch.Tensor:
        """Sparsified task vectors ``[models, elements]``."""
        import torch

        rows = [
            kept(rule, row, block) * scale if scale != 1.0 else kept(rule, row, block)
            for rule, row, scale in zip(self.rules, block.deltas(), self.scales, strict=True)
        ]
        return torch.stack(rows)

    def tables(self) -> tuple[Any, ...]:
        """The rules for the fused kernels; None for a table that no rule needs, then no code that reads it is compiled.

        ``kinds [models]``: places in :data:`_KINDS`; ``cuts [models, 2, 4]`` and ``before [models, 2, grains]``: of
        windows, low and high, key, wanted, tied and stride, and ties before each grain; ``chances [models, 3]``: limit
        and key of random words; ``spans [models, 2]``: least and most probability by rank.
        """
        kinds = np.zeros(len(self.rules), np.int64)
        cuts = np.zeros((len(self.rules), 2, 4), np.int64)
        chances = np.zeros((len(self.rules), 3), np.int64)
        spans = np.zeros((len(self.rules), 2), np.float64)
        windows = [
            cut for rule in self.rules if isinstance(rule, MagnitudeWindow) for cut in (rule.low, rule.high) if cut
        ]
        before = np.zeros((len(self.rules), 2, max((len(cut.before) for cut in windows), default=0)), np.int64)
        for model, rule in enumerate(self.rules):
            kinds[model] = _KINDS.index(type(rule))
            if isinstance(rule, KeepAtRandom):
                chances[model] = (rule.limit, *rule.key)
            if isinstance(rule, KeepByRank):
                chances[model], spans[model] = (0, *rule.key), (rule.least, rule.most)
            if isinstance(rule, MagnitudeWindow):
                for side, cut in enumerate((rule.low, rule.high)):
                    # A wanted count of 0 takes nothing; the largest key is above every score.
                    cuts[model, side] = (cut.key, cut.wanted, cut.tied, cut.stride) if cut else (2**31, 0, 0, 1)
                    if cut and len(cut.before):
                        before[model, side] = cut.before
        of_windows, of_chances, of_spans = (
            any(isinstance(rule, readers) for rule in self.rules)
            for readers in (MagnitudeWindow, KeepAtRandom | KeepByRank, KeepByRank)
        )
        return (
            kinds,
            cuts if of_windows else None,
            before if of_windows else None,
            chances if of_chances else None,
            spans if of_spans else None,
        )


def kernel_tile(rules: Sequence[SparsifyRule], grain: int) -> int:
    """Elements that a fused kernel must see at once: a whole row where ranks count."""
    from mergegate.merge_core.methods.kernels.tiles import TILE

    return grain if any(isinstance(rule, KeepByRank) for rule in rules) or grain % TILE else TILE


Folds: TypeAlias = Generator[Fold, Any, Sparsifier]


def kept(rule: SparsifyRule, delta: torch.Tensor, block: Block) -> torch.Tensor:
    """A task vector's elements ``[n]`` with zeros where ``rule`` drops them."""
    import torch

    match rule:
        case KeepAll():
            return delta
        case KeepNone():
            return torch.zeros_like(delta)
        case MagnitudeWindow(low, high):
            keys = bits(delta.abs())
            mask = taken(low, keys, block)
            if high is not None:
                mask &= ~taken(high, keys, block)
        case KeepAtRandom(limit, key):
            mask = mask_words(key, block.start, len(delta), delta.device) < limit
        case KeepByRank(least, most, key):
            limits = (least + (most - least) * _row_ranks(delta.abs(), block)) * 2.0**32
            mask = mask_words(key, block.start, len(delta), delta.device) < limits
    return torch.where(mask, delta, 0.0)


def dense(task: TensorTask) -> Folds:
    """Every element is kept, whatever ``density`` says."""
    count = len(task.column("weight"))
    return Sparsifier((KeepAll(),) * count, (1.0,) * count, MaskCache(count))
    yield  # A generator without a fold.


def by_magnitude(task: TensorTask) -> Folds:
    """Keep the ``max(1, int(density * n))`` elements of largest magnitude; none at density 0."""
    densities = task.column("density")
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
    return (yield from _rescaled(task, rules))


def by_inner_magnitude(task: TensorTask) -> Folds:
    """Keep ``int(density * n)`` elements of middling magnitude: the ``int(gamma * n)`` largest are dropped as outliers.

    When too few are left below the outliers, as many outliers are kept as are missing.
    """
    rules = _plain_rules(task.column("density"))
    requests: list[SelectionRequest] = []
    windows: list[tuple[int, int, int | None]] = []
    for model, (density, gamma) in enumerate(zip(task.column("density"), task.column("gamma"), strict=True)):
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
    return (yield from _rescaled(task, rules))


def ranked_random(task: TensorTask) -> Folds:
    """Keep with a probability from ``density - epsilon`` (smallest of its row) to ``density + epsilon`` (largest)."""
    densities = task.column("density")
    rules = _plain_rules(densities)
    for model, (density, epsilon, key) in enumerate(
        zip(densities, task.column("epsilon"), task.model_seeds, strict=True)
    ):
        if 0 < density < 1:
            rules[model] = KeepByRank(density - epsilon, density + epsilon, key)
    return (yield from _rescaled(task, rules))


def at_random(task: TensorTask) -> Folds:
    """Keep each element with probability ``density``."""
    densities = task.column("density")
    rules = _plain_rules(densities)
    for model, (density, key) in enumerate(zip(densities, task.model_seeds, strict=True)):
        if 0 < density < 1:
            rules[model] = KeepAtRandom(threshold(density), key)
    return (yield from _rescaled(task, rules))


def folds_at_random(task: TensorTask) -> int:
    """Fold passes of the random rules."""
    return 1 if _drops(task) and task.shared["rescale"] is True else 0


def folds_by_magnitude(task: TensorTask) -> int:
    """Most fold passes of the rules that select by magnitude."""
    return select_passes(task.dtype, task.numel) + folds_at_random(task) if _drops(task) else 0


def _drops(task: TensorTask) -> bool:
    return any(0 < density < 1 for density in task.column("density"))


def magnitudes(task: TensorTask) -> ScoreFunction:
    """``|x_i - b|`` of every model as scores for :func:`~.selection.select`."""

    def sizes(block: Any) -> Any:
        from mergegate.merge_core.methods import kernels

        return kernels.sizes(block.data, block.rows, block.length)

    def first(block: Any) -> Any:
        from mergegate.merge_core.methods import kernels

        return kernels.first_digits(block.data, block.rows, block.length)

    def later(block: Any, streams: Any, prefixes: Any, shift: int, width: int) -> Any:
        from mergegate.merge_core.methods import kernels

        return kernels.next_digits(block.data, block.rows, block.length, streams, prefixes, shift, width)

    def ties(block: Any, streams: Any, keys: Any) -> Any:
        from mergegate.merge_core.methods import kernels

        return kernels.ties(block.data, block.rows, block.length, block.grain, streams, keys)

    return ScoreFunction(lambda block: block.deltas().abs(), task.dtype, Counters(sizes, first, later, ties))


def _plain_rules(densities: Sequence[float]) -> list[SparsifyRule]:
    return [KeepAll() if density >= 1 else KeepNone() for density in densities]


def _rescaled(task: TensorTask, rules: Sequence[SparsifyRule]) -> Folds:
    """The rules with their factors, measured in one more pass when ``rescale`` asks for the L1 norm."""
    mode, densities = task.shared["rescale"], task.column("density")
    notes = MaskCache(len(rules))
    plain = Sparsifier(tuple(rules), (1.0,) * len(rules), notes)
    sparse = any(not isinstance(rule, (KeepAll, KeepNone)) for rule in rules)
    if mode is False or not sparse:
        return plain
    if mode == "density":
        scales = [1 / density if 0 < density < 1 else 1.0 for density in densities]
        return Sparsifier(plain.rules, tuple(scales), notes)

    def of(block: Block) -> torch.Tensor:
        import torch

        return block.grain_sums(torch.stack((block.deltas().abs(), plain.of(block).abs())))

    tables = plain.tables()

    def fused(block: Any) -> Any:
        from mergegate.merge_core.methods import kernels

        tile = kernel_tile(plain.rules, block.grain)
        noted = notes.begin(block.start, block.length, tile)
        kernel: Any = kernels.masked_norms
        return kernel(block.data, block.rows, block.length, block.start, block.grain, tile, *tables, noted)

    norms = yield fold_sums(of, fused)
    scales = [
        float(whole / rest) if whole >= _NO_NORM and rest >= _NO_NORM else 1.0
        for whole, rest in zip(*norms, strict=True)
    ]
    return Sparsifier(plain.rules, tuple(scales), notes)


def _row_ranks(sizes: torch.Tensor, block: Block) -> torch.Tensor:
    """Rank of every element in its row, from 0 (smallest) to 1; equal elements in their order."""
    import torch

    if block.grain == 1:
        return torch.full_like(sizes, 0.5, dtype=torch.float64)
    rows = sizes.reshape(-1, block.grain)
    order = rows.argsort(dim=-1, stable=True)
    places = torch.arange(block.grain, device=sizes.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(-1, order, places)
    return ranks.flatten().double() / (block.grain - 1)

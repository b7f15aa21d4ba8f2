"""Sparsify task vectors: keep elements by magnitude, at random, or both, and rescale them.

Each ``keep_*`` function runs the necessary fold passes and returns a :class:`Sparsifier`. At density 1, all of them
leave the task vector unchanged.

The parameter ``rescale`` sets a factor for the kept elements of a tensor. ``true``: ``sum|d| / sum|kept d|``, or 1 if
either sum is below 1e-7. ``density``: 1 / density, as in the DARE paper. ``false``: 1.

Random masks depend only on seed, tensor name, model index and element index. Philox2x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3", https://doi.org/10.1145/2063384.2063405) computes the random number of an
element from its index, without state. So a mask does not depend on the device, the block size or the number of threads,
and it is the same after a resume. The 64-bit key of a tensor fills the generator's 32-bit key and the upper word of its
counter. The lower word counts pairs of elements, which is enough for tensors of 2**33 elements.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mergegate.merge_core.methods.contract import Block, Fold, StoredBlock, TensorTask, fold_sums, load_kernels, torch
from mergegate.merge_core.methods.selection import (
    ScoreFunction,
    SelectionRequest,
    SelectionThreshold,
    score_bits,
    select,
    select_passes,
    selection_mask,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[np.uint8]

# Constants of Philox.
MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
ROUNDS = 10
_WORD = 0xFFFFFFFF
# Limit of the memory for cached masks, in bytes.
_CACHE_BYTES = 128 << 20
# If an L1 norm is below this, elements are not rescaled.
_NO_NORM = 1e-7


def mask_key(seed: int, tensor: str, model: int) -> tuple[int, int]:
    """Return the key for a tensor of the model with index ``model``: two 32-bit words."""
    digest = hashlib.sha256(f"{seed}\0{tensor}\0{model}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def threshold(probability: float) -> int:
    """Return the limit such that a random 32-bit word is below it with the given probability."""
    return round(min(max(probability, 0.0), 1.0) * 2**32)


def mask_words(key: tuple[int, int], start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return uniform random 32-bit words for ``count`` elements from index ``start``: int64 ``[count]``."""
    first = start // 2
    pairs = torch.arange(first, (start + count + 1) // 2, dtype=torch.int64, device=device)
    low, high = philox(pairs & _WORD, torch.full_like(pairs, key[1]), key[0])
    return torch.stack((low, high), dim=1).flatten()[start - 2 * first :][:count]


def philox(low: torch.Tensor, high: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply Philox2x32-10 to the counters ``(low, high)``. All tensors are int64 and hold 32-bit words."""
    for round_number in range(ROUNDS):
        product = low * MULTIPLIER  # May wrap around as a signed number, but its 64 bits are right.
        low = ((product >> 32) & _WORD) ^ high ^ ((key + round_number * WEYL) & _WORD)
        high = product & _WORD
    return low, high


class MaskCache:
    """Cached masks for the blocks of one tensor, from one pass over the tensor to the next.

    Computing a mask costs more than reading the elements. All tensors share a fixed amount of memory. A mask that does
    not fit is computed again, with the same result.
    """

    _lock = threading.Lock()
    _free_bytes = _CACHE_BYTES  # Shared by all caches.

    def __init__(self, models: int) -> None:
        self._empty = np.empty((models, 0), np.uint8)
        self._masks: dict[int, Bits] = {}

    def begin(self, start: int, length: int, tile: int) -> Bits:
        """Return memory for the mask of a block, or an empty array if the shared memory is used up.

        The memory becomes available again when the array is no longer referenced. ``start`` is the index of the block's
        first element, ``length`` its number of elements, and ``tile`` the number that the kernel processes at a time.
        """
        shape = (len(self._empty), -(-length // tile) * (-(-tile // 8)))
        size = shape[0] * shape[1]
        with MaskCache._lock:
            if size > MaskCache._free_bytes:
                return self._empty
            MaskCache._free_bytes -= size
        mask: Bits = np.empty(shape, np.uint8)
        weakref.finalize(mask, MaskCache._release, size)
        if size:
            self._masks[start] = mask
        return mask

    def take(self, start: int) -> Bits:
        """Remove and return the mask of the block at ``start``. Return an empty array if it is not cached."""
        return self._masks.pop(start, self._empty)

    @staticmethod
    def _release(size: int) -> None:
        with MaskCache._lock:
            MaskCache._free_bytes += size


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

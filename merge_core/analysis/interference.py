"""Measure interference: how far the parents' task vectors agree, layer by layer, and how far the merge moved.

::

    measured = measure_interference(origin, parents, merge)     # checkpoints, whose weights are streamed from disk
    measured.network_tally.cosine(0, 1)
    measured.layers()["model.layers", 0].conflict

A task vector is the difference between a model and the model it was fine-tuned from (Ilharco et al. 2023, arXiv
2212.04089). A sign conflict is a weight that two task vectors move in opposite directions. TIES resolves such conflicts
(Yadav et al. 2023, arXiv 2306.01708). Models are read and tallied in blocks, so memory use does not depend on their
size. The Gram matrix of whole task vectors (``Tally.gram``) shows outliers, and gives robust weights of the models::

    find_outliers(gram, max_ratio=5)          # {3: 12.4}: model 3's task vector is 12.4 times as long as the median
    geometric_median(gram, [1, 1, 1])         # shares that add up to 1
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.architecture import (
    KINDS,
    TensorKind,
    find_tensor,
    parse_layer_place,
    rename_to_layout,
    stacks,
    tensor_kind,
)
from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import BY_CODE, Checkpoint, numbers
from mergegate.merge_core.engine import BufferPool, InputFiles, JobInputs, read_ahead
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import StoredBlock
from mergegate.merge_core.plan import Input, OutputTensor, TensorJob
from mergegate.merge_core.system import cores_of_process

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A task vector moves a weight noticeably if the change exceeds this share of the root mean square of its changes in the
# grain. Fine-tuning also moves weights by single rounding steps, and the sign of such a change means nothing.
NOTICEABLE = 0.1
# Number of elements in a grain. It is part of the definition of a noticeable change, not a tuning parameter.
GRAIN = 1 << 16

# Reason for skipping a tensor that is not finite in some model.
NOT_FINITE = "NaN or infinities"
# Memory for one block of all models, as float32. It is fixed because sums are accumulated block by block.
_BLOCK_BYTES = 16 << 20
_THREADS = 4
_POOL_BYTES = 64 << 20
# With fewer input bytes than this, loading the compiled kernels takes longer than they save.
_FUSE_FROM_BYTES = 64 << 20


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tally(_Record):
    """Sums over ``elements`` weights that describe how far ``vectors`` task vectors agree.

    ``gram`` is symmetric, ``[vectors, vectors]``. If there is a merge, a last row and column stand for its difference
    from the origin. ``pair_moved`` and ``pair_opposed`` are in the order of :attr:`pairs`.
    """

    elements: int
    vectors: int
    origin: float  # sum of squares of the origin's weights
    gram: tuple[tuple[float, ...], ...]  # inner products of the differences between models and origin
    moved: int  # weights that at least two task vectors move noticeably
    opposed: int  # of these, weights that two task vectors move in opposite directions
    pair_moved: tuple[int, ...]  # ``moved`` and ``opposed`` for each pair
    pair_opposed: tuple[int, ...]

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            elements=self.elements + other.elements,
            vectors=self.vectors,
            origin=self.origin + other.origin,
            gram=tuple(_add(left, right) for left, right in zip(self.gram, other.gram, strict=True)),
            moved=self.moved + other.moved,
            opposed=self.opposed + other.opposed,
            pair_moved=_add(self.pair_moved, other.pair_moved),
            pair_opposed=_add(self.pair_opposed, other.pair_opposed),
        )

    @property
    def has_merge(self) -> bool:
        return len(self.gram) > self.vectors

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs of task vector numbers: (0, 1), (0, 2), ..., (1, 2), ..."""
        return tuple(combinations(range(self.vectors), 2))

    def norm(self, vector: int) -> float:
        return math.sqrt(self.gram[vector][vector])

    def length(self, vector: int) -> float | None:
        """Return the L2 norm of a task vector divided by that of the origin, or None if the origin is zero."""
        return self._relative(self.gram[vector][vector])

    def cosine(self, first: int, second: int) -> float | None:
        """Return the cosine of two task vectors (-1 to 1), or None if one of them is zero."""
        norms = self.norm(first) * self.norm(second)
        return max(-1.0, min(1.0, self.gram[first][second] / norms)) if norms else None

    @property
    def conflict(self) -> float | None:
        """Share (0 to 1) of weights that move in opposite directions, among those that several task vectors move.

        Two unrelated task vectors conflict in half of the weights that both move. None if there are no such weights.
        """
        return self.opposed / self.moved if self.moved else None

    def pair_conflict(self, first: int, second: int) -> float | None:
        """Return the :attr:`conflict` of two task vectors alone."""
        index = self.pairs.index((min(first, second), max(first, second)))
        return self.pair_opposed[index] / self.pair_moved[index] if self.pair_moved[index] else None

    @property
    def merge_length(self) -> float | None:
        """Distance of the merge from the origin, divided by the L2 norm of the origin. None without a merge."""
        return self._relative(self.gram[-1][-1]) if self.has_merge else None

    def merge_distance(self, vector: int) -> float | None:
        """Return the distance of the merge from parent ``vector``, divided by the L2 norm of the origin."""
        if not self.has_merge:
            return None
        merge_square, cross, vector_square = self.gram[-1][-1], self.gram[-1][vector], self.gram[vector][vector]
        return self._relative(max(0.0, merge_square - 2 * cross + vector_square))

    def _relative(self, square: float) -> float | None:
        return math.sqrt(square / self.origin) if self.origin else None


def total(tallies: Sequence[Tally]) -> Tally:
    return reduce(Tally.__add__, tallies)


def _add(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


# Number of steps of Weiszfeld's algorithm, and the smoothing distance relative to the median length. It keeps the
# weights finite when the point coincides with a model.
_STEPS, _SMOOTH = 200, 1e-6


def find_outliers(gram: Sequence[Sequence[float]], max_ratio: float) -> dict[int, float]:
    """Find the task vectors that are more than ``max_ratio`` times as long as the median task vector.

    Return the length of each as a multiple of the median length, by index. The result is empty if the median is zero,
    that is, if more than half of the models equal the base.
    """
    lengths = np.sqrt(np.maximum(np.diagonal(np.asarray(gram, float)), 0))
    median_length = float(np.median(lengths))
    if not median_length > 0:
        return {}
    return {
        index: float(length / median_length)
        for index, length in enumerate(lengths)
        if length > max_ratio * median_length
    }


def normalized_lengths_and_distances(gram: Sequence[Sequence[float]]) -> list[tuple[float, float | None]]:
    """Return the length of each task vector and its median distance to the other task vectors.

    Both are multiples of the median length. A single task vector has the distance None.
    """
    products = np.asarray(gram, float)
    squares = np.maximum(np.diagonal(products), 0)
    median_length = float(np.median(np.sqrt(squares))) or 1.0
    distances = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * products, 0))
    results: list[tuple[float, float | None]] = []
    for index, square in enumerate(squares):
        others = np.delete(distances[index], index)
        median_distance = float(np.median(others)) / median_length if len(others) else None
        results.append((float(np.sqrt(square)) / median_length, median_distance))
    return results


def geometric_median(gram: Sequence[Sequence[float]], model_weights: Sequence[float]) -> tuple[float, ...]:
    """Return the share of each task vector in their geometric median. The shares add up to 1.

    The geometric median minimizes the weighted sum of distances to all task vectors. It is computed with Weiszfeld's
    algorithm, which only needs the Gram matrix (Pillutla et al. 2022, https://arxiv.org/abs/1912.13445). Models with
    less than half of the total weight cannot pull the point far from the others. Model weights must not be negative,
    and at least one must be positive.
    """
    products = np.asarray(gram, float)
    weights = np.asarray(model_weights, float) / np.sum(model_weights)
    squares = np.diagonal(products)
    scale = float(np.median(squares)) or float(squares.mean()) or 1.0
    shares = weights
    for _ in range(_STEPS):
        square_distances = np.diagonal(products) - 2 * products @ shares + shares @ products @ shares
        pull = weights / np.sqrt(np.maximum(square_distances, 0) / scale + _SMOOTH**2)
        shares = pull / pull.sum()
    return tuple(shares.tolist())


class TensorGroup(_Record):
    """Tally of all tensors of one kind in one layer, or outside the layers."""

    stack: str  # 'model.layers'; empty outside the layers
    layer: int | None  # from 0; None outside the layers
    kind: TensorKind
    tally: Tally


class Skipped(_Record):
    """Tensors that were not compared for one reason."""

    reason: str
    tensors: int
    example: str  # name of the first tensor


class Interference(_Record):
    """Result of :func:`measure_interference`.

    Task vectors are numbered in the order of the parents. ``spots`` has the tensors before the layers, then the layers,
    then the tensors after the layers.
    """

    vectors: int
    has_merge: bool
    spots: tuple[TensorGroup, ...]
    skipped: tuple[Skipped, ...]

    @property
    def network_tally(self) -> Tally:
        return total([spot.tally for spot in self.spots])

    def layers(self) -> dict[tuple[str, int], Tally]:
        """Return the tallies of the layers by stack name and layer index, in network order."""
        parts: dict[tuple[str, int], list[Tally]] = {}
        for spot in self.spots:
            if spot.layer is not None:
                parts.setdefault((spot.stack, spot.layer), []).append(spot.tally)
        return {layer: total(tallies) for layer, tallies in parts.items()}


Progress: TypeAlias = Callable[[int, int], None]
"""Function called with the number of bytes read so far and in total."""


def measure_interference(
    origin: Checkpoint,
    parents: Sequence[Checkpoint],
    merge: Checkpoint | None = None,
    *,
    on_progress: Progress | None = None,
) -> Interference:
    """Tally how the parents and the merge differ from ``origin``, over all floating-point tensors.

    A tensor is skipped if a model lacks it, has it in another shape (for example for another vocabulary) or has NaN or
    infinity in it. If the merge has other layers than the origin, only the parents are compared.

    Args:
        origin: Base model, from which task vectors are measured.
        parents: One or more fine-tuned models.
        merge: Model that was merged from the parents. None: compare the parents only.
        on_progress: Function called with the number of bytes read so far and in total.

    Raises:
        InvalidInput: A file cannot be read, or no tensor can be compared.
    """
    skipped: dict[str, list[str]] = {}
    origin, parents = split_experts(origin), [split_experts(parent) for parent in parents]
    parents = [rename_to_layout(origin, parent) for parent in parents]
    merge = rename_to_layout(origin, split_experts(merge)) if merge is not None else None
    if merge is not None and stacks(merge.tensors) != stacks(origin.tensors):
        skipped.setdefault("the merge has other layers than its parents", []).extend(merge.tensors)
        merge = None
    models = [origin, *parents, *([merge] if merge is not None else [])]
    jobs = _jobs(models, skipped)
    sums = _tally_jobs(jobs, len(parents), on_progress)
    for index, job in enumerate(jobs):
        if not _is_finite(sums[index]):  # Infinities that all models have in common are no differences.
            sums[index : index + 1] = _tally_jobs([job], len(parents), None, constants=True)
    parts: dict[tuple[str, int, TensorKind], list[Tally]] = {}
    for job, tally in zip(jobs, sums, strict=True):
        name = job.output.name
        if _is_finite(tally):
            at = parse_layer_place(name)
            place = (at.stack, at.index) if at else ("", -1)
            parts.setdefault((*place, tensor_kind(name)), []).append(tally)
        else:
            skipped.setdefault(NOT_FINITE, []).append(name)
    if not parts:
        found, expected = "no tensor with the same name and shape in all models", "models of one architecture"
        if NOT_FINITE in skipped:
            found = "NaN or infinity in every tensor of this model or of the models compared with it"
            expected = "finite numbers"
        raise InvalidInput(str(origin.directory), found=found, expected=expected)
    # Embeddings come first, then each stack by layer, then all other tensors outside of stacks.
    in_network_order = sorted(
        parts,
        key=lambda key: (1 if key[0] else 0 if key[2] == "embedding" else 2, key[0], key[1], KINDS.index(key[2])),
    )
    return Interference(
        vectors=len(parents),
        has_merge=merge is not None,
        spots=tuple(
            TensorGroup(stack=stack, layer=layer if stack else None, kind=kind, tally=total(parts[stack, layer, kind]))
            for stack, layer, kind in in_network_order
        ),
        skipped=tuple(Skipped(reason=key, tensors=len(names), example=names[0]) for key, names in skipped.items()),
    )


def tally_grains(block: StoredBlock, vectors: int) -> Tally:
    """Tally one block with NumPy. This is the readable reference for the fused kernels.

    The rows of ``block`` are the origin, ``vectors`` parents, and the merge if there is one.
    """
    data = numbers(block.data, BY_CODE["BF16"]) if block.data.dtype == np.uint16 else block.data
    rows = np.stack([data[start : start + block.length] for start in block.rows])
    origin, gram = 0.0, np.zeros((len(rows) - 1, len(rows) - 1))
    counts = np.zeros((1 + vectors * (vectors - 1) // 2, 2), np.int64)
    for begin in range(0, block.length, block.grain):
        part = rows[:, begin : begin + block.grain]
        with np.errstate(invalid="ignore"):  # sums that are not finite are handled after the last block
            deltas = (part[1:] - part[0]).astype(np.float64)
            products = deltas @ deltas.T
        origin, gram = origin + float(np.sum(part[0].astype(np.float64) ** 2)), gram + products
        limits = _limits(np.diag(products)[:vectors], part.shape[1])[:, None]
        signs = (deltas[:vectors] > limits).astype(np.int8) - (deltas[:vectors] < -limits).astype(np.int8)
        opposed = (signs > 0).any(axis=0) & (signs < 0).any(axis=0)
        counts[0] += (np.count_nonzero(signs, axis=0) >= 2).sum(), opposed.sum()
        for pair, (first_vector, second_vector) in enumerate(combinations(range(vectors), 2), start=1):
            joint_signs = signs[first_vector] * signs[second_vector]
            counts[pair] += (joint_signs != 0).sum(), (joint_signs < 0).sum()
    return _tally(block.length, vectors, origin, gram, counts)


def _fused_tally(block: StoredBlock, vectors: int) -> Tally:
    from mergegate.merge_core.methods.kernels import gram, oppositions, squares

    size = len(block.rows) - 1
    upper = gram(block.data, block.rows, block.length, block.grain, True)
    products = np.zeros((len(upper), size, size))
    rows, columns = np.triu_indices(size)
    products[:, rows, columns] = products[:, columns, rows] = upper
    lengths = np.minimum(block.grain, block.length - np.arange(len(upper)) * block.grain)
    limits = _limits(np.diagonal(products, axis1=1, axis2=2)[:, :vectors], lengths[:, None])
    counts = oppositions(block.data, block.rows[: vectors + 1], block.length, block.grain, limits)
    origin = squares(block.data, block.rows[0], block.length, block.grain)
    return _tally(block.length, vectors, float(np.sum(origin)), np.sum(products, axis=0), counts)


def _limits(square_sums: NDArray[Any], elements: Any) -> NDArray[np.float32]:
    """Return the size from which a difference is noticeable, from the square sums of ``elements`` differences."""
    limits: NDArray[np.float32] = (NOTICEABLE * np.sqrt(square_sums / elements)).astype(np.float32)
    return limits


def _tally(elements: int, vectors: int, origin: float, gram: NDArray[Any], counts: NDArray[Any]) -> Tally:
    return Tally(
        elements=elements,
        vectors=vectors,
        origin=origin,
        gram=tuple(tuple(float(x) for x in row) for row in gram),
        moved=int(counts[0, 0]),
        opposed=int(counts[0, 1]),
        pair_moved=tuple(int(x) for x in counts[1:, 0]),
        pair_opposed=tuple(int(x) for x in counts[1:, 1]),
    )


def _jobs(models: Sequence[Checkpoint], skipped_tensors: dict[str, list[str]]) -> list[TensorJob]:
    """Return one job for each tensor that all models have in the same shape, in the order of the origin's files."""
    jobs = []
    for name, first in models[0].tensors.items():
        tensors = [tensor for model in models if (tensor := find_tensor(model, name)) is not None]
        reason = ""
        if len(tensors) < len(models):
            reason = "not in every model"
        elif any(tensor.dtype.kind != "float" for tensor in tensors):
            reason = "not of floating point"
        elif any(tensor.shape != first.shape for tensor in tensors):
            reason = "of another shape in some model"
        if reason:
            skipped_tensors.setdefault(reason, []).append(name)
        elif first.numel:
            inputs = tuple(Input(str(index), tensor) for index, tensor in enumerate(tensors))
            output = OutputTensor(name, first.dtype, first.shape)
            jobs.append(TensorJob(output, inputs, has_base=True, shared={}, per_input=(), mode="merge"))
    return jobs


def _is_finite(tally: Tally) -> bool:
    return all(math.isfinite(value) for value in (tally.origin, *(x for row in tally.gram for x in row)))


def _tally_jobs(
    jobs: Sequence[TensorJob], vectors: int, on_progress: Progress | None, *, constants: bool = False
) -> list[Tally]:
    """Return the tally of each job. Blocks are computed concurrently but added in order, so sums are reproducible.

    With ``constants``, infinities that all models have in common count as zeros.
    """
    total_bytes, bytes_done = sum(job.nbytes_in for job in jobs), 0
    tally = _fused_tally if total_bytes >= _FUSE_FROM_BYTES else tally_grains
    pool = BufferPool(_POOL_BYTES, pinned=False)

    def work(inputs: JobInputs, number: int) -> Tally:
        with inputs.load(number) as block:
            if constants:
                block.take_constants()
            return tally(block.stored_block(), vectors)

    sums: list[list[Tally]] = [[] for _ in jobs]
    threads = min(_THREADS, cores_of_process() + 1)
    pending: deque[tuple[int, Future[Tally]]] = deque()

    def collect_oldest() -> None:
        nonlocal bytes_done
        index, future = pending.popleft()
        sums[index].append(future.result())
        bytes_done += sums[index][-1].elements * sum(item.tensor.dtype.size for item in jobs[index].inputs)
        if on_progress is not None:
            on_progress(bytes_done, total_bytes)

    paths = (part.file for job in jobs for part in job.stored_tensors)
    with InputFiles(paths) as files, ThreadPoolExecutor(threads) as executor:
        try:
            for index, job in enumerate(jobs):
                if index + 1 < len(jobs):
                    read_ahead(jobs[index + 1], files)
                elements = max(1, _BLOCK_BYTES // (4 * len(job.inputs)) // GRAIN) * GRAIN
                inputs = JobInputs(job, files, block=elements, grain=GRAIN, pool=pool)
                for number in range(inputs.count):
                    if len(pending) > threads:
                        collect_oldest()
                    pending.append((index, executor.submit(work, inputs, number)))
            while pending:
                collect_oldest()
        finally:
            for _, future in pending:
                future.cancel()
    pool.close()
    return [total(parts) for parts in sums]

"""Compare the weights of models, tensor by tensor.

The gate needs to know whether a merge is a copy of one parent (``find_copied_parent``). A release also states which of
its tensors are new and which ones it takes over from a parent (``compare_with_parents``). Different tensors nearly
always differ in their first numbers, so mergegate reads a tensor completely only if it is equal to that of a parent.

Rules that leave models out or weight them need the distances between models (``model_distances``). mergegate reads all
weights once. If some are not finite, it reads them again to find out which models contain them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, Field

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.adapters import open_adapter
from mergegate.merge_core.analysis import NOT_FINITE, measure_interference, normalized_lengths_and_distances
from mergegate.merge_core.checkpoint import (
    PICKLED_SINGLE_NAME,
    SINGLE_NAME,
    AnyTensor,
    Checkpoint,
    DerivedTensor,
    DType,
    is_head,
    is_module_file,
    numbers,
    patterns,
    read_header,
    read_pickled,
)
from mergegate.merge_core.engine import count_infinite, count_non_finite
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.stage import StageValue, advance, value_stage
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.models.checkpoints import Model, PinnedCheckpoint
from mergegate.tasks.models.checkpoints.hub import element_reader

if TYPE_CHECKING:
    from numpy.typing import NDArray

_read_stored = element_reader(None)
_FIRST_BLOCK, _BLOCK = 64 << 10, 16 << 20  # bytes that are compared first, and in each further step
_PROBE = 1024  # leading numbers by which equal tensors with different names are found
_NAMED = 5  # models that a sentence names
# Largest relative error of rounding a number to a format, for the comparison of numbers in different formats.
_ROUNDING = {"BF16": 2.0**-8, "F16": 2.0**-10}

Tensors: TypeAlias = Mapping[str, AnyTensor]
Equality = Literal["identical", "rounded", "different"]


class CopiedParent(StageValue):
    """Parent that a merge copies."""

    parent: int | None  # Index of the first parent with the same weights; None if the merge differs from all of them.

    def summary(self) -> str:
        return "no parent has the same weights" if self.parent is None else "the merge is a copy"


@value_stage("copies", version=1)
def find_copied_parent(merge: Model, parents: tuple[Model, ...]) -> CopiedParent:
    """Find out whether ``merge`` has the weights of one of ``parents``, up to the rounding of their number formats.

    For a merge that differs, the first differing block of weights ends the comparison.

    Raises:
        InvalidInput: A checkpoint cannot be read.
    """
    merged = open_checkpoint(merge.directory).tensors
    for index, parent in enumerate(parents):
        opened = parent.open() if isinstance(parent, PinnedCheckpoint) else open_checkpoint(parent.directory)
        if any(not is_head(name) for name in merged.keys() ^ opened.tensors.keys()):
            continue
        pairs = [(tensor, opened.tensors[name]) for name, tensor in merged.items() if name in opened.tensors]
        if all(compare_tensors(tensor, other) != "different" for tensor, other in pairs):
            return CopiedParent(parent=index)
    return CopiedParent(parent=None)


class CopiedTensors(BaseModel, frozen=True, extra="forbid"):
    """Tensors of a merge that are equal to tensors of the same parents. No other entry counts them."""

    parent: int = Field(ge=0)  # Index of the first parent, in the recipe's order.
    # None in releases of earlier versions, which have one entry per parent and count shared tensors in each of them.
    further_parents: tuple[int, ...] | None = None
    tensors: int = Field(ge=1)
    parameters: int = Field(ge=0)
    identical: bool  # Whether all of them have the same bytes. Otherwise, some are equal up to rounding.


class WeightComparison(StageValue):
    """Number of tensors of a merge that are new, or equal to tensors of its parents.

    Tensors are compared as a whole, with all tensors of the parents that have the same shape.
    """

    is_adapter: bool = False  # Whether the tensors are those of adapters.
    tensors: int = Field(ge=1)  # Tensors of the merge.
    parameters: int = Field(ge=0)
    new: int = Field(ge=0)  # Tensors that no parent has.
    new_parameters: int = Field(ge=0)
    reshaped: int = Field(ge=0)  # New tensors with a shape that no tensor of a parent has.
    copied: tuple[CopiedTensors, ...]  # In the recipe's order. Empty if all tensors are new.
    copy_of: tuple[int, ...] = ()  # Parents whose weights are all those of the merge, under the same names.

    def summary(self) -> str:
        return f"{self.new:,} of {self.tensors:,} tensors are new"

    def sentences(self, names: Sequence[str]) -> str:
        """Return the result of the comparison as sentences for the statement of changes.

        ``names`` are the names of all parents, in the recipe's order. The words may change between versions. The
        numbers and names must be those of :meth:`figures`.
        """
        adapter = " of the adapter" if self.is_adapter else ""
        whose = "a tensor of their adapters" if self.is_adapter else "a tensor of these models"
        total = format_count(self.tensors, "tensor")
        if self.copy_of:
            is_exact = all(first.identical for first, parents in self._groups() if {*parents} & {*self.copy_of})
            sources = _listed([names[index] for index in self.copy_of])
            return (
                f"This release is a copy. Its weights{adapter} are {'' if is_exact else 'up to rounding '}those of "
                f"{sources}. The merge changed none of its {total}."
            )
        lines = [f"mergegate compared the {total}{adapter} with those of all these models."]
        for group, parents in self._groups():
            verb = "is" if group.tensors == 1 else "are"
            what = "copied unchanged from" if group.identical else "equal, up to rounding, to those of"
            sources = f"each of {len(parents)} models"
            if len(parents) <= _NAMED:
                sources = ("each of " if len(parents) > 1 else "") + _listed([names[index] for index in parents])
            count, whole, share = self._counts(group)
            lines.append(f"{count} of {whole} ({share} % of the parameters) {verb} {what} {sources}.")
        if not self.new:
            lines.append("The recipe only selected and arranged tensors. None of them is new.")
        elif self.new == 1:
            lines.append(f"{'The other' if self.copied else 'This'} one is new: it is not equal to {whose}.")
        else:
            which = f"The other {self.new:,}" if self.copied else "All of them"
            lines.append(f"{which} are new: none is equal to {whose}.")
        if self.reshaped:
            have = "has" if self.reshaped == 1 else "have"
            lines.append(
                f"{self.reshaped:,} of the new tensors {have} a shape that no tensor of these models has. "
                "Parts of such a tensor can be copies."
            )
        return " ".join(lines)

    def figures(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the numbers and the names of parents that ``sentences`` states, in the same order.

        ``mergegate verify`` compares them with a release of any version, so they must not change.

        Raises:
            IndexError: ``names`` has no name for a parent.
        """
        total = f"{self.tensors:,}"
        if self.copy_of:
            return (*(names[index] for index in self.copy_of), total)
        figures = [total]
        for group, parents in self._groups():
            sources = [names[index] for index in parents]
            figures += (*self._counts(group), *(sources if len(sources) <= _NAMED else (str(len(sources)),)))
        figures += [f"{self.new:,}"] if self.new > 1 and self.copied else []
        figures += [f"{self.reshaped:,}"] if self.reshaped else []
        return tuple(figures)

    def _groups(self) -> Iterable[tuple[CopiedTensors, Sequence[int]]]:
        """Return the entries with the parents that the sentence about each names.

        One sentence names all parents of earlier versions' entries with the same numbers.
        """
        groups: dict[object, tuple[CopiedTensors, list[int]]] = {}
        for each in self.copied:
            counts = (each.tensors, each.parameters, each.identical)
            _, parents = groups.setdefault(counts if each.further_parents is None else each, (each, []))
            parents += (each.parent, *(each.further_parents or ()))
        return groups.values()

    def _counts(self, source: CopiedTensors) -> tuple[str, str, str]:
        """Return the number of copied tensors, that of all tensors, and the share of the parameters in percent."""
        percent = 100 * source.parameters / max(self.parameters, 1)
        share = f"{percent:.1f}" if percent in (0, 100) or 0.05 <= percent < 99.95 else f"{percent:.4g}"
        return f"{source.tensors:,}", f"{self.tensors:,}", share


def _listed(names: Sequence[str]) -> str:
    """Return names as in a sentence: 'a, b and c'."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def describe_changes(comparison: WeightComparison | None, names: Sequence[str]) -> str:
    """Return which weights of a merge are new, or that this is unknown if there is no ``comparison``."""
    if comparison is None:
        return "mergegate did not compare them with the weights of these models."
    return comparison.sentences(names)


@value_stage("weights", version=2)
def compare_with_parents(merge: Model, parents: tuple[PinnedCheckpoint, ...]) -> WeightComparison:
    """Compare each tensor of ``merge`` with the tensors of all ``parents``.

    If the merge is an adapter, its tensors are compared with those of the parents' adapters.

    Raises:
        InvalidInput: A checkpoint cannot be read.
    """
    adapter = merge.adapter if isinstance(merge, PinnedCheckpoint) else None
    if adapter:
        merged: Tensors = {tensor.name: tensor for tensor in open_adapter(adapter.directory).stored_tensors}
        adapters = [parent.adapter and open_adapter(parent.adapter.directory) for parent in parents]
        tables: list[Tensors] = [
            {tensor.name: tensor for tensor in each.stored_tensors} if each else {} for each in adapters
        ]
    else:
        merged = _all_tensors(open_checkpoint(merge.directory))
        tables = [_all_tensors(parent.open()) for parent in parents]
    return compare_tables(merged, tables, is_adapter=adapter is not None)


def _all_tensors(checkpoint: Checkpoint) -> Tensors:
    """Return the tensors of a model, including those of sentence-transformers modules in folders of their own."""
    tensors: dict[str, AnyTensor] = dict(checkpoint.tensors)
    for name in sorted(filter(is_module_file, checkpoint.companions)):  # safetensors comes last and takes precedence
        folder, _, file = name.partition("/")
        source = checkpoint.companions.sources[name]
        if file in (SINGLE_NAME, PICKLED_SINGLE_NAME) and not isinstance(source, bytes):
            header = (read_header if file == SINGLE_NAME else read_pickled)(source / name, within=source)
            tensors |= {f"{folder}/{tensor.name}": replace(tensor, name=f"{folder}/{tensor.name}") for tensor in header}
    return tensors


def compare_tables(merge: Tensors, parents: Sequence[Tensors], *, is_adapter: bool = False) -> WeightComparison:
    """Compare each tensor in ``merge`` with the tensors of all ``parents``, which are given by name."""
    shapes = {tensor.shape for table in parents for tensor in table.values()}
    probes = [_ProbeIndex(table) for table in parents]
    new, new_parameters, reshaped = 0, 0, 0
    # The key is the parents with the same tensor, and whether its bytes are the same in all of them.
    counts, parameters = Counter[tuple[tuple[int, ...], bool]](), Counter[tuple[tuple[int, ...], bool]]()
    same_name = Counter[int]()  # tensors of the merge that are equal to the parent's tensor with the same name
    for name, tensor in merge.items():
        equal: dict[int, Equality] = {}
        for index, table in enumerate(parents):
            equality = compare_tensors(tensor, table[name]) if name in table else "different"
            same_name[index] += equality != "different"
            if equality == "different":
                equality = probes[index].find(tensor)
            if equality != "different":
                equal[index] = equality
        if equal:
            key = (tuple(equal), "rounded" not in equal.values())
            counts[key] += 1
            parameters[key] += tensor.numel
        else:
            new, new_parameters = new + 1, new_parameters + tensor.numel
            reshaped += tensor.shape not in shapes
    return WeightComparison(
        is_adapter=is_adapter,
        tensors=len(merge),
        parameters=sum(tensor.numel for tensor in merge.values()),
        new=new,
        new_parameters=new_parameters,
        reshaped=reshaped,
        copied=tuple(
            CopiedTensors(
                parent=parent,
                further_parents=tuple(further),
                tensors=counts[(parent, *further), identical],
                parameters=parameters[(parent, *further), identical],
                identical=identical,
            )
            for (parent, *further), identical in sorted(counts)
        ),
        copy_of=tuple(
            index
            for index, table in enumerate(parents)
            if all(is_head(name) for name in merge.keys() ^ table.keys())
            and same_name[index] == len(merge.keys() & table.keys())
        ),
    )


class _ProbeIndex:
    """Index of a parent's tensors by shape and first numbers, to find a tensor that has another name in the merge."""

    def __init__(self, table: Tensors) -> None:
        self._by_shape: dict[tuple[int, ...], list[AnyTensor]] = {}
        for tensor in table.values():
            self._by_shape.setdefault(tensor.shape, []).append(tensor)
        self._by_probe: dict[tuple[tuple[int, ...], str], dict[bytes, list[AnyTensor]]] = {}

    def find(self, tensor: AnyTensor) -> Equality:
        """Return how ``tensor`` is equal to one of the parent's tensors after rounding those to its format."""
        candidates = self._by_shape.get(tensor.shape, [])
        if not candidates:
            return "different"
        key = (tensor.shape, tensor.dtype.code)
        if key not in self._by_probe:
            index = self._by_probe[key] = {}
            for candidate in candidates:
                index.setdefault(_probe(candidate, tensor.dtype), []).append(candidate)
        results = [compare_tensors(tensor, each) for each in self._by_probe[key].get(_probe(tensor, tensor.dtype), ())]
        return "identical" if "identical" in results else "rounded" if "rounded" in results else "different"


def _probe(tensor: AnyTensor, dtype: DType) -> bytes:
    """Return the first numbers of a tensor in the format ``dtype``."""
    block = _read_block(tensor_elements(tensor), tensor, 0, _PROBE)
    if tensor.dtype == dtype:
        return block.tobytes()
    if {tensor.dtype.kind, dtype.kind} != {"float"}:
        return b""
    import torch

    values = torch.from_numpy(numbers(patterns(block, tensor.dtype), tensor.dtype).copy())
    return values.to(getattr(torch, dtype.torch_name)).view(torch.uint8).numpy().tobytes()


def compare_tensors(tensor: AnyTensor, reference: AnyTensor) -> Equality:
    """Return whether two tensors have the same bytes, or the same numbers up to the rounding of their formats."""
    if tensor.shape != reference.shape:
        return "different"
    readers = [(each, tensor_elements(each)) for each in (tensor, reference)]
    largest = max(tensor.dtype.size, reference.dtype.size)
    first = 0
    equality: Equality = "identical"
    while first < tensor.numel:
        count = min((_BLOCK if first else _FIRST_BLOCK) // largest, tensor.numel - first)
        blocks = [_read_block(elements, each, first, count) for each, elements in readers]
        first += count
        if tensor.dtype == reference.dtype and np.array_equal(blocks[0], blocks[1]):
            continue
        equality = "rounded"
        if {tensor.dtype.kind, reference.dtype.kind} != {"float"}:
            return "different"
        one, two = (
            numbers(patterns(block, each.dtype), each.dtype) for block, (each, _) in zip(blocks, readers, strict=True)
        )
        # Sums of float32 numbers may differ in their last bits. Rounded to 16 bits, equal numbers are equal.
        relative = max(_ROUNDING.get(each.dtype.code, 0.0) for each in (tensor, reference))
        is_narrow = tensor.dtype == reference.dtype and relative > 0
        absolute = 0.0 if is_narrow else 1e-6 * float(np.abs(two).max())
        if not (np.abs(one - two) <= (0.0 if is_narrow else relative) * np.abs(two) + absolute).all():
            return "different"
    return equality


def tensor_elements(tensor: AnyTensor) -> Callable[[int, Any], None]:
    """Return a function that fills a buffer with the elements of ``tensor``, from a given element on."""
    return tensor.open(_read_stored) if isinstance(tensor, DerivedTensor) else partial(_read_stored, tensor)


def _read_block(elements: Callable[[int, Any], None], tensor: AnyTensor, first: int, count: int) -> NDArray[np.uint8]:
    block = np.empty(min(count, tensor.numel - first) * tensor.dtype.size, np.uint8)
    elements(first, block)
    return block


class ModelDistances(StageValue):
    """Inner products between the task vectors of whole models, in the order in which the models were passed."""

    models: Annotated[tuple[str, ...], NotInKey]
    broken: tuple[int, ...]  # count of NaN and infinite numbers in each model
    gram: tuple[tuple[float, ...], ...]  # products of the models without such numbers

    @property
    def sound(self) -> tuple[int, ...]:
        """Indices of the models without NaN or infinity, in the order of the rows in ``gram``."""
        return tuple(index for index, count in enumerate(self.broken) if not count)

    def summary(self) -> str:
        lengths = normalized_lengths_and_distances(self.gram) if self.gram else []
        parts = [f"{self.models[index]} {length:.1f}" for index, (length, _) in zip(self.sound, lengths, strict=True)]
        parts += [f"{self.models[index]} broken" for index, count in enumerate(self.broken) if count]
        return f"lengths over the median: {', '.join(parts)}"


@value_stage("distances", version=2)
def model_distances(base: PinnedCheckpoint, models: tuple[PinnedCheckpoint, ...]) -> ModelDistances:
    """Return the inner products between the task vectors of ``models``, measured from ``base``.

    Models that contain NaN or infinity have no products. For them, only the count of such numbers is returned.

    Raises:
        InvalidInput: A file cannot be read, the base contains NaN or infinity, or there is nothing to compare.
    """
    checkpoints = [model.open() for model in models]
    broken = [0] * len(checkpoints)
    gram = _products(base, checkpoints)
    if gram is None:
        in_base = _non_finite(base.open())
        constants = {name for name, (_, is_constant) in in_base.items() if is_constant}
        if in_base.keys() == constants:  # A broken base also breaks the models that are adapters on it.
            broken = [_count_damage(checkpoint, constants) for checkpoint in checkpoints]
            gram = _products(
                base, [checkpoint for checkpoint, count in zip(checkpoints, broken, strict=True) if not count]
            )
        if gram is None and not all(broken):
            raise InvalidInput(
                f"{base.name} ({base.directory})",
                found="NaN or infinity",
                expected="a base with finite numbers, from which task vectors are measured",
                remedy="get the checkpoint again",
            )
    return ModelDistances(
        models=tuple(model.name for model in models), broken=tuple(broken), gram=tuple(tuple(row) for row in gram or ())
    )


def _products(base: PinnedCheckpoint, checkpoints: Sequence[Checkpoint]) -> Sequence[Sequence[float]] | None:
    """Return the inner products of the task vectors, or None if a number is not finite or there is no model."""
    if not checkpoints:
        return None
    try:
        interference = measure_interference(
            base.open(), checkpoints, on_progress=lambda done, total: advance(done, max(total, 1), "B")
        )
    except InvalidInput:
        if not any(map(_non_finite, checkpoints)):  # Non-finite numbers can also leave nothing to compare.
            raise
        return None
    return None if any(item.reason == NOT_FINITE for item in interference.skipped) else interference.network_tally.gram


def _count_damage(checkpoint: Checkpoint, constants: Collection[str]) -> int:
    """Return the number of NaN and infinite values in a model, except in tensors that are ``constants`` of its base."""
    non_finite = _non_finite(checkpoint).items()
    return sum(count for name, (count, is_constant) in non_finite if not (is_constant and name in constants))


def _non_finite(checkpoint: Checkpoint) -> dict[str, tuple[int, bool]]:
    """Count the NaN and infinite values of each tensor of a model that has any.

    Overflows that a finite adapter causes count too. The second value is true if the tensor has only infinities, as the
    clip bounds of some networks do.
    """
    counts: dict[str, tuple[int, bool]] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype.kind != "float":
            continue
        elements = tensor_elements(tensor)
        size, count, infinite = tensor.dtype.size, 0, 0
        for first in range(0, tensor.numel, _BLOCK // size):
            piece = np.empty(min(_BLOCK, (tensor.numel - first) * size), np.uint8)
            elements(first, piece)
            count += count_non_finite(piece, tensor.dtype, fused=False)
            infinite += count_infinite(piece, tensor.dtype) if count else 0
        if count:
            counts[tensor.name] = count, infinite == tensor.numel
    return counts

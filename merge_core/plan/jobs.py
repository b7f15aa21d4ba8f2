"""Define the plan of a merge: a job per output tensor, the files with their bytes, and the rows of token tables.

The position of every output byte is decided before the first input byte is read. If the result has the donor's tensors,
it distributes them over files as the donor does. Otherwise tensors are packed in order into files no larger than the
donor's largest. If the donor stores a tensor whole, so does the result, even if several jobs compute it (one per
expert, see ``merge_core.architecture.experts``). Each job then fills a part of its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mergegate.merge_core.architecture import is_inputs_first, is_projection
from mergegate.merge_core.architecture.experts import DiskTensor, disk_name, to_disk_tensors
from mergegate.merge_core.checkpoint import (
    SINGLE_NAME,
    AnyTensor,
    ChatTemplates,
    Checkpoint,
    Companions,
    DType,
    ExpectedImportance,
    ExpectedMoments,
    SizedTensor,
    StoredMoments,
    StoredTensor,
    render_header,
)
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.methods import Method, TensorTask
from mergegate.merge_core.recipe import Recipe

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Values in ``RowMap.lender`` that are not the index of a model.
SEVERAL = -1  # Mean of the rows of several models; ``row`` is then an index into ``shared``.
ZERO = -2
MEAN = -3  # Mean of all rows of the model's own table.


@dataclass(frozen=True, eq=False)
class RowMap:
    """The source of each row that one model contributes to an output table."""

    models: tuple[str, ...]  # references of the models that lend rows, including the contributing model
    own: int  # index of the contributing model in ``models``
    lender: NDArray[np.int32]  # index in ``models`` for each output row, or ``SEVERAL``, ``ZERO`` or ``MEAN`` [n]
    row: NDArray[np.int64]  # row in the lender's table [n]
    # Rows to average for each ``SEVERAL`` entry, as pairs of an index in ``models`` and a row.
    shared: tuple[tuple[tuple[int, int], ...], ...] = ()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RowMap)
            and (self.models, self.own, self.shared) == (other.models, other.own, other.shared)
            and np.array_equal(self.lender, other.lender)
            and np.array_equal(self.row, other.row)
        )

    __hash__ = None  # type: ignore[assignment]  # Arrays are not hashable.

    def __len__(self) -> int:
        return len(self.lender)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First output row of each run, followed by the total number of rows."""
        same = self.lender[1:] == self.lender[:-1]
        follows = self.row[1:] == self.row[:-1] + 1
        is_constant = (self.lender[1:] == ZERO) | (self.lender[1:] == MEAN)
        breaks = np.flatnonzero(~(same & (follows | is_constant))) + 1
        return np.concatenate([[0], breaks, [len(self)]]).astype(np.int64)


# Default shard size of Hugging Face, used if the donor is a single file and the result needs several.
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class OutputTensor(SizedTensor):
    """Name, format and shape of a tensor to write, which is all or a part of a tensor in a file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One output file."""

    name: str
    header: bytes  # first bytes of the file: length prefix and JSON header
    tensors: tuple[str, ...]  # names of the computed tensors, in the order of their bytes
    offsets: tuple[int, ...]  # offset of each computed tensor from the start of the file, in bytes
    size: int  # size of the whole file, in bytes
    # Tensors that the header lists, in the same order. Each consists of one or more of ``tensors``.
    stored: tuple[DiskTensor, ...]

    def dtypes(self) -> dict[str, DType]:
        return {piece: tensor.dtype for tensor in self.stored for piece in tensor.pieces}


def lay_out(tensors: Sequence[OutputTensor], donor: Checkpoint) -> tuple[Shard, ...]:
    """Return the shards for ``tensors``, in the order of the donor's bytes.

    ``donor`` must have its fused experts split (:func:`merge_core.architecture.experts.split_experts`). If the donor
    lacks any of ``tensors``, the shards keep the order of ``tensors`` instead.
    """
    stored = to_disk_tensors({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}, donor)
    donor_parts = {disk_name(tensor): tensor.parts for tensor in donor.tensors.values()}
    groups: dict[str, list[DiskTensor]] = {}
    if all(donor_parts.get(tensor.name) for tensor in stored):
        order = {name: position for position, name in enumerate(donor_parts)}
        for tensor in sorted(stored, key=lambda tensor: order[tensor.name]):
            groups.setdefault(donor_parts[tensor.name][0].file.name, []).append(tensor)
    else:
        groups = _pack(stored, donor)
    if len(groups) == 1:
        names = [SINGLE_NAME]
    elif all(name.endswith(".safetensors") for name in groups):
        names = list(groups)
    else:
        names = [f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors" for index in range(len(groups))]
    return tuple(_shard(name, group) for name, group in zip(names, groups.values(), strict=True))


def lay_out_modules(outputs: Sequence[OutputTensor]) -> tuple[Shard, ...]:
    """Return one file per folder for the merged tensors of modules, in the order of ``outputs``."""
    folders: dict[str, list[DiskTensor]] = {}
    for tensor in outputs:
        disk = DiskTensor(tensor.name, tensor.dtype, tensor.shape, (tensor.name,))
        folders.setdefault(tensor.name.partition("/")[0], []).append(disk)
    return tuple(_shard(f"{folder}/{SINGLE_NAME}", tensors) for folder, tensors in folders.items())


def _shard(file: str, tensors: Sequence[DiskTensor]) -> Shard:
    # In a plan, the tensors of a module have the name of its folder as a prefix, but not in its file.
    folder = file[: file.rfind("/") + 1]
    entries = [(tensor.name.removeprefix(folder), tensor.dtype.code, tensor.shape, tensor.nbytes) for tensor in tensors]
    header = render_header(entries, {"format": "pt"})
    pieces, offsets, position = [], [], len(header)
    for tensor in tensors:
        for piece in tensor.pieces:
            pieces.append(piece)
            offsets.append(position)
            position += tensor.nbytes // len(tensor.pieces)
    return Shard(file, header, tuple(pieces), tuple(offsets), position, tuple(tensors))


def _pack(tensors: Sequence[DiskTensor], donor: Checkpoint) -> dict[str, list[DiskTensor]]:
    file_sizes: dict[str, int] = {}
    for donor_tensor in donor.tensors.values():
        if donor_tensor.parts:
            file = donor_tensor.parts[0].file.name
            file_sizes[file] = file_sizes.get(file, 0) + donor_tensor.nbytes
    is_single = len(file_sizes) <= 1
    limit = max(DEFAULT_SHARD_BYTES, *file_sizes.values(), 0) if is_single else max(file_sizes.values())
    groups: list[list[DiskTensor]] = []
    filled = limit + 1
    for tensor in tensors:
        if filled + tensor.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return {str(number): group for number, group in enumerate(groups)}


def requires_index(shards: Sequence[Shard]) -> bool:
    """Return whether readers need :data:`merge_core.checkpoint.INDEX_NAME` because the network is in several files."""
    return len(network_shards(shards)) > 1


def network_shards(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Return the files of the network. All others are in the folders of sentence-transformers modules."""
    return tuple(shard for shard in shards if "/" not in shard.name)


# These classes and OutputTensor use slots because a very large model has 50,000 jobs.
@dataclass(frozen=True, slots=True)
class Input:
    """One input of a job."""

    model: str  # reference of the model that has the tensor
    tensor: AnyTensor
    # Origin of each output row. None means that the tensor's own rows are used in their order.
    rows: RowMap | None = None
    # Statistics of the activations that the tensor is multiplied with, measured or still expected.
    moments: StoredMoments | ExpectedMoments | None = None
    importance: AnyTensor | ExpectedImportance | None = None  # importance of each element, measured or still expected


@dataclass(frozen=True, slots=True)
class TensorJob:
    """The computation of one output tensor."""

    output: OutputTensor  # name, format and shape of the output tensor
    inputs: tuple[Input, ...]  # input tensors, the base first if ``has_base``
    has_base: bool  # whether the first input is the base
    shared: Mapping[str, Any]  # values of the method's parameters that all inputs share
    per_input: tuple[Mapping[str, Any], ...]  # values of the method's other parameters, one mapping per input
    # ``merge`` applies the method. ``copy`` copies the only input. ``equal`` requires that all inputs are the same
    # (integers, except a single number, which is a counter) and copies the first.
    mode: Literal["merge", "copy", "equal"]

    @property
    def stored_tensors(self) -> tuple[StoredTensor, ...]:
        """Stored tensors that the job reads block by block."""
        tensors = (*(item.tensor for item in self.inputs), *self.measured_importance)
        return tuple(part for tensor in tensors for part in tensor.parts)

    @property
    def importance(self) -> tuple[AnyTensor | ExpectedImportance, ...]:
        """Importance of each element of each model except the base, in the output's shape.

        Empty unless all of these models have it.
        """
        if self.mode != "merge":
            return ()
        all_importance = [item.importance for item in self.inputs[1 if self.has_base else 0 :]]
        available = tuple(value for value in all_importance if value is not None)
        return available if len(available) == len(all_importance) else ()

    @property
    def measured_importance(self) -> tuple[AnyTensor, ...]:
        """Values of :attr:`importance` that have already been measured."""
        return tuple(value for value in self.importance if not isinstance(value, ExpectedImportance))

    @property
    def measured_tensors(self) -> tuple[StoredTensor, ...]:
        return tuple(item.moments.tensor for item in self.inputs if isinstance(item.moments, StoredMoments))

    @property
    def nbytes_in(self) -> int:
        return sum(item.tensor.nbytes for item in self.inputs) + sum(value.nbytes for value in self.importance)

    @property
    def arithmetic(self) -> Literal["float32", "float64"]:
        return "float64" if any(item.tensor.dtype.code == "F64" for item in self.inputs) else "float32"

    def mismatch(self, item: Input) -> InvalidInput:
        """Return the error for an input whose integers differ from those of the first input."""
        return InvalidInput(
            f"{item.model}: {item.tensor.name}",
            found=f"{item.tensor.dtype.code} numbers that differ from those of {self.inputs[0].model}",
            expected="equal integers, because only floating-point weights can be merged",
            remedy="merge models of one kind, and merge before you quantize",
        )

    def task(self, seeds: tuple[tuple[int, int], ...] = ()) -> TensorTask:
        """Return the job in the form that the method takes.

        ``seeds`` has one key per input for the random masks. Omit it for estimates, which do not depend on the masks.
        """
        return TensorTask(
            name=self.output.name,
            shape=self.output.shape,
            dtype=self.arithmetic,
            has_base=self.has_base,
            shared=self.shared,
            per_input=self.per_input,
            seeds=seeds or ((0, 0),) * len(self.inputs),
            is_projection=len(self.output.shape) == 2 and is_projection(self.output.name),
            inputs_first=len(self.output.shape) == 2 and is_inputs_first(self.output.name),
            moments=tuple(item.moments for item in self.inputs),
            has_importance=bool(self.importance),
        )


def bulk_dtype(jobs: Iterable[TensorJob]) -> DType | None:
    """Return the floating-point format of most output bytes, which the config should declare."""
    sizes: Counter[DType] = Counter()
    for job in jobs:
        if job.output.dtype.kind == "float":
            sizes[job.output.dtype] += job.output.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


@dataclass(frozen=True)
class MergePlan:
    """Everything that a merge will do, fixed before it starts.

    Args:
        recipe: Recipe of the merge.
        donor: Checkpoint that provides config, tokenizer and layout.
        jobs: One job per output tensor, in the order of the output bytes.
        shards: Output files.
        config: Content of the output's ``config.json``.
        bytes_read: Total size of all inputs of all jobs, in bytes.
        bytes_written: Total size of all shards, in bytes.
        tokenizer: Checkpoint that provides the tokenizer files. It is the donor unless the recipe chooses another.
        companions: Files to write next to the weights and ``config.json``.
        chat_templates: Chat templates of the result by name; ``companions`` includes them.
        steps: Merges to execute first, in this order. Their results are inputs of this plan or of later steps.
        findings: Inconsistencies, such as unused input tensors and configs that disagree with tensors. The record of
            the merge includes them.
    """

    recipe: Recipe
    donor: Checkpoint
    jobs: tuple[TensorJob, ...]
    shards: tuple[Shard, ...]
    config: Mapping[str, Any]
    bytes_read: int
    bytes_written: int
    tokenizer: Checkpoint
    companions: Companions = field(default_factory=Companions)
    chat_templates: ChatTemplates = field(default_factory=dict)
    steps: tuple[MergePlan, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def method(self) -> Method:
        """Merge method."""
        return self.recipe.method

    @property
    def parameters(self) -> int:
        """Number of parameters in the result."""
        return sum(job.output.nbytes // job.output.dtype.size for job in self.jobs)

"""Define the plan of a merge: one job per output tensor, and everything else that the engine needs to execute it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mergegate.merge_core.architecture import is_inputs_first, is_projection
from mergegate.merge_core.checkpoint import (
    AnyTensor,
    ChatTemplates,
    Checkpoint,
    Companions,
    DType,
    ExpectedImportance,
    ExpectedMoments,
    StoredMoments,
    StoredTensor,
)
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.methods import Method, TensorTask
from mergegate.merge_core.plan.layout import OutputTensor, Shard
from mergegate.merge_core.plan.rows import RowMap
from mergegate.merge_core.recipe import Recipe


# These classes and OutputTensor use slots because a very large model has 50,000 jobs.
@dataclass(frozen=True, slots=True)
class Input:
    """One input of a job.

    Args:
        model: Reference of the model that has the tensor.
        tensor: The tensor.
        rows: Origin of each output row. None means that the tensor's own rows are used in their order.
        moments: Statistics of the activations that the tensor is multiplied with, measured or still expected.
        importance: Importance of each element, measured or still expected.
    """

    model: str
    tensor: AnyTensor
    rows: RowMap | None = None
    moments: StoredMoments | ExpectedMoments | None = None
    importance: AnyTensor | ExpectedImportance | None = None


@dataclass(frozen=True, slots=True)
class TensorJob:
    """The computation of one output tensor.

    Args:
        output: Name, format and shape of the output tensor.
        inputs: Input tensors, the base first if ``has_base``.
        has_base: Whether the first input is the base.
        shared: Values of the method's parameters that all inputs share.
        per_input: Values of the method's other parameters, one mapping per input.
        mode: ``merge`` applies the method. ``copy`` copies the only input. ``equal`` requires that all inputs are the
            same (integers, except a single number, which is a counter) and copies the first.
    """

    output: OutputTensor
    inputs: tuple[Input, ...]
    has_base: bool
    shared: Mapping[str, Any]
    per_input: tuple[Mapping[str, Any], ...]
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
        """Stored tensors with activation statistics of the inputs."""
        return tuple(item.moments.tensor for item in self.inputs if isinstance(item.moments, StoredMoments))

    @property
    def nbytes_in(self) -> int:
        """Number of bytes in all inputs and their importance."""
        return sum(item.tensor.nbytes for item in self.inputs) + sum(value.nbytes for value in self.importance)

    @property
    def arithmetic(self) -> Literal["float32", "float64"]:
        """Number format for computing the job: float64 if any input is float64, otherwise float32."""
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

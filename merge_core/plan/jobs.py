"""The plan as a value: jobs, one an output tensor, and what else the engine must know to carry them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.methods import Method, TensorTask
from mergegate.merge_core.plan.layout import OutputTensor, Shard
from mergegate.merge_core.plan.rows import RowMap
from mergegate.merge_core.recipe import Recipe


# These, and OutputTensor, with slots: of a very large model there are 50,000 jobs.
@dataclass(frozen=True, slots=True)
class Input:
    """One input of a job: the model it comes from, the tensor, and its rows if they are not taken as they are; what it
    is multiplied with, or how much each element matters, where that is asked for and was, or will be, measured."""

    model: str
    tensor: AnyTensor
    rows: RowMap | None = None
    moments: StoredMoments | ExpectedMoments | None = None
    importance: AnyTensor | ExpectedImportance | None = None


@dataclass(frozen=True, slots=True)
class TensorJob:
    """One output tensor.

    Args:
        output: Name, format and shape.
        inputs: What it is made of; the base first when ``has_base``.
        has_base: Whether the first input is the base.
        shared: Values of the method's shared parameters.
        per_input: Values of its other parameters, one mapping per input.
        mode: ``merge``: by the method; ``copy``: the only input, as it is; ``equal``: all inputs must be the same
            (integers), the first is copied.
    """

    output: OutputTensor
    inputs: tuple[Input, ...]
    has_base: bool
    shared: Mapping[str, Any]
    per_input: tuple[Mapping[str, Any], ...]
    mode: Literal["merge", "copy", "equal"]

    def written_as(self, dtype: DType) -> TensorJob:
        """The job with a result in that format."""
        if dtype == self.output.dtype:
            return self
        return replace(self, output=replace(self.output, dtype=dtype))

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The stored tensors that are read for it, block by block."""
        tensors = (*(item.tensor for item in self.inputs), *self.measured_importance)
        return tuple(part for tensor in tensors for part in tensor.parts)

    @property
    def importance(self) -> tuple[AnyTensor | ExpectedImportance, ...]:
        """How much each element of each model that is not the base matters, of the output's shape; empty unless that
        is known of all."""
        if self.mode != "merge":
            return ()
        found = [item.importance for item in self.inputs[1 if self.has_base else 0 :]]
        known = tuple(one for one in found if one is not None)
        return known if len(known) == len(found) else ()

    @property
    def measured_importance(self) -> tuple[AnyTensor, ...]:
        """The same, once it has been measured."""
        return tuple(one for one in self.importance if not isinstance(one, ExpectedImportance))

    @property
    def measured(self) -> tuple[StoredTensor, ...]:
        """Where what was measured of its inputs lies."""
        return tuple(item.moments.tensor for item in self.inputs if isinstance(item.moments, StoredMoments))

    @property
    def nbytes_in(self) -> int:
        """Bytes of all inputs, and of what is read beside them."""
        return sum(item.tensor.nbytes for item in self.inputs) + sum(one.nbytes for one in self.importance)

    @property
    def arithmetic(self) -> Literal["float32", "float64"]:
        """Format that is computed in: float64 when an input is."""
        return "float64" if any(item.tensor.dtype.code == "F64" for item in self.inputs) else "float32"

    def task(self, seeds: tuple[tuple[int, int], ...] = ()) -> TensorTask:
        """The job as the method sees it.

        Args:
            seeds: One key per input for the random masks; absent: for estimates, which hang on no chance.
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


@dataclass(frozen=True)
class MergePlan:
    """Everything that a merge will do, fixed before it starts.

    Args:
        recipe: What was asked.
        donor: Checkpoint that gives config, tokenizer and layout.
        jobs: One per output tensor, in the order of the output bytes.
        shards: Output files.
        config: Content of the output's ``config.json``.
        bytes_read: Bytes of all inputs, each counted once.
        bytes_written: Bytes of all shards.
        tokenizer: Checkpoint that gives the tokenizer files; the donor unless the recipe says otherwise.
        companions: Files that are written next to the weights and ``config.json``.
        chat_templates: Chat templates of the result by name, which are among ``companions``.
        steps: Merges to carry out before, whose results are inputs of this one (and of each other, in order).
        findings: What does not balance: input tensors without a place, configs that disagree with tensors. They end up
            in the record of the merge.
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
        """The merge method."""
        return self.recipe.method

    @property
    def parameters(self) -> int:
        """Number of parameters of the result."""
        return sum(job.output.nbytes // job.output.dtype.size for job in self.jobs)

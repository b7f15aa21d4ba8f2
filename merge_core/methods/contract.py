"""Define what a merge method consists of: parameters, properties, and a generator of passes over blocks of a tensor.

A method never sees a whole tensor. Its generator ``steps`` yields :class:`Fold` passes. The engine runs each over all
blocks and sends its result back. For computations with whole matrices, the generator yields a :class:`Solve`. At the
end, it returns the :class:`Map` that turns one block of all inputs into one block of output::

    def steps(task):
        norms = yield fold_sums(lambda block: block.grain_sums(block.inputs**2))   # → [inputs] float64
        scale = 1 / norms.sum()
        return Map(lambda block: (block.inputs * scale).sum(0))

These functions take a :class:`Block` (torch, any device) and are the readable reference. Each may have a fused
counterpart for the CPU, which takes a :class:`StoredBlock` with the stored numbers and must give the same result.

Sums are computed for each *grain*, which is a row or a fixed number of elements, and grains are combined in order. So
results depend neither on the block size nor on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        """The module torch, imported at its first use: that takes seconds, and fused kernels do not need it."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("torch"), name)
            setattr(self, name, value)
            return value

    torch = _Torch()

Array: TypeAlias = NDArray[Any]
Scalar: TypeAlias = bool | int | float | str
Values: TypeAlias = Mapping[str, Any]

# Number of elements in a grain for methods that do not need rows. From 32768 elements on, torch would add in parallel,
# and the order of additions inside a grain could change.
GRAIN = 16384

REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method.

    Args:
        name: Name in the recipe.
        kind: Type of the value.
        scope: ``shared``: one value per output tensor. ``input``: one value per model, including the base.
            ``non_base``: one value per model except the base.
        default: Value if the recipe has none. ``REQUIRED`` means that the recipe must set the parameter.
        summary: One-line description for users.
        minimum, maximum: Inclusive range. None means unbounded.
        choices: Allowed texts of a ``choice``, or texts that a ``switch`` allows in addition to true and false.
    """

    name: str
    kind: Literal["float", "int", "bool", "choice", "switch"]
    scope: Literal["shared", "input", "non_base"]
    default: Any
    summary: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """Allowed values as text, for example ``0 to 1``, ``from 1`` or ``sum, count``. Empty without a limit."""
        if self.kind == "choice":
            return ", ".join(self.choices)
        if self.kind in ("bool", "switch"):
            return ", ".join(("true", "false", *self.choices))
        if self.minimum is None and self.maximum is None:
            return ""
        if self.maximum is None:
            return f"from {self.minimum:g}"
        return f"{self.minimum:g} to {self.maximum:g}" if self.minimum is not None else f"up to {self.maximum:g}"


class InputMoments(Protocol):
    """Second moments of the inputs ``x`` of a linear layer: the mean of ``x x'`` over the positions of a text."""

    @property
    def width(self) -> int:
        """Number of inputs of the layer (``in``)."""

    @property
    def is_diagonal(self) -> bool:
        """Whether only the diagonal was measured, which has the mean squares."""

    def read(self) -> Array:
        """Return the moments in float64: a symmetric matrix ``[in, in]``, or its diagonal ``[in]``."""


@dataclass(frozen=True)
class TensorTask:
    """Everything that a method knows about one output tensor.

    Args:
        name: Name of the output tensor.
        shape: Shape of the output tensor.
        dtype: Data type of the arithmetic: ``float64`` if an input has that type, else ``float32``.
        has_base: Whether input 0 is the base.
        shared: Values of the shared parameters.
        per_input: Values of the other parameters, one mapping per input.
        seeds: One key per input for random masks (:mod:`merge_core.methods.sparsify`).
        is_projection: Whether the tensor is the matrix ``[out, in]`` of a linear layer inside a layer of the model.
        inputs_first: Whether that matrix is stored as ``[in, out]``.
        moments: Second moments of what this layer receives in each input model. None where they were not measured.
        has_importance: Whether :attr:`Block.importance` is available.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "float64"]
    has_base: bool
    shared: Values
    per_input: tuple[Values, ...]
    seeds: tuple[tuple[int, int], ...]
    is_projection: bool = False
    inputs_first: bool = False
    moments: tuple[InputMoments | None, ...] = ()
    has_importance: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Number of inputs of the linear layer, if the tensor is its matrix."""
        return self.shape[0] if self.inputs_first else self.shape[-1]

    def model_values(self, name: str) -> list[float]:
        """Return the value of parameter ``name`` for each input except the base."""
        return [float(values[name]) for values in self.per_input[1 if self.has_base else 0 :]]

    @property
    def model_seeds(self) -> tuple[tuple[int, int], ...]:
        """Random keys of all inputs except the base."""
        return self.seeds[1 if self.has_base else 0 :]

    @property
    def model_moments(self) -> tuple[InputMoments, ...]:
        """Second moments of all inputs except the base. Empty unless they were measured for each."""
        moments = self.moments[1 if self.has_base else 0 :]
        measured = tuple(item for item in moments if item is not None)
        return measured if len(measured) == len(moments) else ()


@dataclass(frozen=True)
class Block:
    """Consecutive elements of the flattened inputs, as tensors.

    Args:
        inputs: ``[inputs, elements]`` in the data type of the arithmetic. Row 0 is the base if the task has one.
        start: Index of the first element in the flattened tensor, a multiple of ``grain``.
        grain: Number of elements in a grain.
        importance: ``[models, elements]``: importance (0 or more) of each element to each model except the base. None
            if it was not measured.
    """

    inputs: torch.Tensor
    start: int
    grain: int
    importance: torch.Tensor | None = None

    @property
    def base(self) -> torch.Tensor:
        """Elements of the base: ``[elements]``."""
        return self.inputs[0]

    def deltas(self) -> torch.Tensor:
        """Return the task vectors, that is, the other inputs minus the base: ``[models, elements]``."""
        return self.inputs[1:] - self.inputs[0]

    def grains(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape ``[..., elements]`` to ``[..., grains, grain]``. The last grain is padded with zeros."""
        short = -values.shape[-1] % self.grain
        filled = torch.nn.functional.pad(values, (0, short)) if short else values
        return filled.reshape(*values.shape[:-1], -1, self.grain)

    def grain_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the float64 sum of each grain for :func:`fold_sums`: ``[..., elements]`` → ``[grains, ...]``."""
        return self.grains(values.double()).sum(-1).movedim(-1, 0)


def add_in_order(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the vectors from left to right. ``torch.sum`` may use another order, which would change the rounding."""
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    return total


@dataclass(frozen=True)
class StoredBlock:
    """Consecutive elements of the flattened inputs, as one array of stored numbers for fused kernels.

    Args:
        data: Contiguous 1-D array: uint16 (bit patterns of bfloat16), float32 or float64.
        rows: Index in ``data`` at which each input starts. The base comes first if the task has one.
        length: Number of elements of each input.
        start: Index of the first element in the flattened tensor.
        grain: Number of elements in a grain.
    """

    data: Array
    rows: NDArray[np.int64]
    length: int
    start: int
    grain: int

    def run(self, kernel: str, *arguments: Any) -> Any:
        """Call a fused kernel with the data, rows and length of the block, followed by ``arguments``."""
        return getattr(load_kernels(), kernel)(self.data, self.rows, self.length, *arguments)


def load_kernels() -> Any:
    """Import and return the module of the fused kernels. The import takes a second because of numba."""
    return import_module("mergegate.merge_core.methods.kernels")


@dataclass(frozen=True)
class Fold:
    """One pass over all blocks that reduces them to a few numbers.

    Create it with :func:`fold_sums`, :func:`fold_counts` or :func:`fold_grains` if possible.

    Args:
        reduce_block: Function that computes the partial result of a block.
        combine: Function that combines the partial results, in block order, into the result of the pass.
        reduce_stored: Fused counterpart of ``reduce_block`` on the CPU.
        eager: Whether partial results may be combined in any order, as soon as they arrive. This saves memory.
        sample_count: Number of pieces, spread over the tensor, that the pass reads instead of all blocks. The tensor
            must have at least ``GRAIN`` elements. The merged tensor must not depend on the result, so use it only for
            guesses that are verified. Default: 0, a full pass.
        in_order: Whether to compute the blocks one after another, so that ``reduce_block`` can accumulate them.
    """

    reduce_block: Callable[[Block], torch.Tensor]
    combine: Callable[[Sequence[Array]], Array]
    reduce_stored: Callable[[StoredBlock], Array] | None = None
    eager: bool = False
    sample_count: int = 0
    in_order: bool = False


@dataclass(frozen=True)
class Solve:
    """A computation with whole matrices between two passes.

    ``compute`` is called with the device name, and ``yield`` returns its result. Torch runs it on one thread, so that
    the order of additions is fixed.
    """

    compute: Callable[[str], Any]


@dataclass(frozen=True)
class Map:
    """The last pass, which computes each block of output.

    Args:
        map_block: Function that returns ``[elements]`` in the data type of the arithmetic.
        map_stored: Fused counterpart on the CPU. It writes the output into its second argument, an array of uint16
            (bit patterns of bfloat16), float32 or float64.
    """

    map_block: Callable[[Block], torch.Tensor]
    map_stored: Callable[[StoredBlock, Array], None] | None = None


Steps: TypeAlias = Generator[Fold | Solve, Any, Map]


def map_only(create_map: Callable[[TensorTask], Map]) -> Callable[[TensorTask], Steps]:
    """Return the ``steps`` of a method without fold passes. ``create_map`` returns the map for a tensor."""

    def steps(task: TensorTask) -> Steps:
        return create_map(task)
        yield  # This makes the function a generator.

    return steps


def row_length(shape: tuple[int, ...], shared_values: Values) -> int:
    """Return the length of a row, the unit that row-wise methods process. A vector counts as one row."""
    return max(shape[-1], 1) if shape else 1


def fold_sums(
    reduce_block: Callable[[Block], torch.Tensor], reduce_stored: Callable[[StoredBlock], Array] | None = None
) -> Fold:
    """Return a pass that adds up the results of all grains. ``reduce_block`` returns float64 ``[grains, ...]``."""
    return Fold(reduce_block, lambda parts: np.sum(np.concatenate(parts), axis=0), reduce_stored)


def fold_counts(
    reduce_block: Callable[[Block], torch.Tensor], reduce_stored: Callable[[StoredBlock], Array] | None = None
) -> Fold:
    """Return a pass that adds up the results of all blocks. ``reduce_block`` returns integers of one shape."""

    def combine(parts: Sequence[Array]) -> Array:
        if len(parts) == 1:
            return parts[0]
        total = parts[0].astype("int64")
        for part in parts[1:]:
            total += part
        return total

    return Fold(reduce_block, combine, reduce_stored, eager=True)


def fold_grains(
    reduce_block: Callable[[Block], torch.Tensor], reduce_stored: Callable[[StoredBlock], Array] | None = None
) -> Fold:
    """Return a pass that concatenates the results of all grains. ``reduce_block`` returns ``[grains, ...]``."""
    return Fold(reduce_block, np.concatenate, reduce_stored)


@dataclass(frozen=True)
class Costs:
    """Computational costs of a method, for the forecast of a merge. ``benchmarks/method_costs.py`` measures them.

    One unit of arithmetic is to widen a bfloat16 number, multiply it and add it. mergegate measures how long a unit
    takes on a machine, and predicts the speed of every method from it.

    Args:
        map: Units of the map, per input element.
        fold: Units of one fold pass, per input element.
        folds: Function that returns the number of fold passes over a tensor, or the maximum if it depends on the
            weights.
        products: Function that returns the floating-point operations of all float64 matrix products and decompositions
            for a tensor. None for methods that do not work on matrices.
        held_bytes: Function that returns the peak number of bytes that a tensor needs in addition to its blocks. None
            for methods that do not work on matrices.
    """

    map: float
    fold: float = 0.0
    folds: Callable[[TensorTask], int] = field(default=lambda task: 0, repr=False)
    products: Callable[[TensorTask], float] | None = field(default=None, repr=False)
    held_bytes: Callable[[TensorTask], int] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ConflictRemedy:
    """Change of a recipe to a method that resolves conflicts between task vectors.

    Args:
        reason: Effect of the method, as a clause that follows its name: ``keeps the largest and lets the stronger sign
            win``.
        settings: Parameters to set in the recipe.
        additions: Parameters to set in the recipe unless the previous method has a parameter of the same name.
    """

    reason: str
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    additions: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Traits:
    """Properties of a method, so that other packages do not have to know methods by name.

    Args:
        adds_up: Whether the method adds task vectors, so that opposing elements cancel.
        sparse: Whether the method keeps only part of each task vector, as set by the parameter ``density``.
        may_zero: Whether parameters can scale a tensor to zero, so that a tensor of zeros may be intended.
        merges_base: Whether the base is merged like a model. If not, it is only the origin of task vectors.
        adapters: How to merge adapters of one base into an adapter: as a ``sum`` of their low-rank products, which is
            lossless, or by applying the method to the ``products``. None: the result cannot be an adapter, because it
            depends on more than the differences from the base.
        conflict_remedy: How to change a recipe to this method if task vectors conflict. None if it does not help.
        first_draft: Clause that describes the method, for the recipe that ``init`` writes. Empty for methods that
            ``init`` does not use.
        reads_text: What to measure for each model on its own calibration text: second ``moments`` of the inputs of its
            linear layers (:class:`InputMoments`), or ``importance`` of its elements (:attr:`Block.importance`).
        weights_by_distance: Whether the weights of the models are computed from the distances between them.
    """

    adds_up: bool = False
    sparse: bool = False
    may_zero: bool = False
    merges_base: bool = False
    adapters: Literal["sum", "products"] | None = None
    conflict_remedy: ConflictRemedy | None = None
    first_draft: str = ""
    reads_text: Literal["moments", "importance"] | None = None
    weights_by_distance: bool = False


@dataclass(frozen=True)
class Method:
    """A merge method.

    Args:
        name: Value of ``merge_method`` in a recipe.
        summary: One-line description for users.
        paper: Reference to the publication.
        base: Role of the recipe's base. ``required``: it is input 0. ``optional``: it is input 0 if there is one.
            ``ordinary``: it is an input like the models. ``donor``: if it is one of the models, it comes first. If not,
            it only provides the config and the tokenizer, or is an input too if there is a single model.
        models: Minimum and maximum number of inputs other than the base. A maximum of None means any number.
        parameters: Parameters that a recipe may set.
        steps: Generator function that computes a tensor (see the module docstring).
        grain: Function that returns the number of elements in a grain for a shape and the shared parameters.
        single_input: What to do with a tensor that only one input has: ``copy`` it, or ``compute`` it from this input.
        check: Function that raises InvalidInput if the parameters of a tensor do not fit together. Its arguments are
            the shared values, the values per input, and the location for the message.
        costs: Costs for the forecast. None: not measured, so the forecast assumes costs and says so.
        traits: Properties for other packages.
        formula: Formula for the reference page. ``b`` is the base, ``x_i`` are the models, ``w_i`` their weights.
    """

    name: str
    summary: str
    paper: str
    base: Literal["required", "optional", "ordinary", "donor"]
    models: tuple[int, int | None]
    parameters: tuple[Parameter, ...]
    steps: Callable[[TensorTask], Steps] = field(repr=False)
    grain: Callable[[tuple[int, ...], Values], int] = field(default=lambda shape, shared: GRAIN, repr=False)
    single_input: Literal["copy", "compute"] = "compute"
    check: Callable[[Values, Sequence[Values], str], None] = field(default=lambda *_: None, repr=False)
    costs: Costs | None = field(default=None, repr=False)
    traits: Traits = field(default=Traits(), repr=False)
    formula: str = field(default="", repr=False)

    @property
    def has_task_vectors(self) -> bool:
        """Whether the base, if there is one, is the origin of differences and not an input like the models."""
        return self.base in ("required", "optional")

    def parameter(self, name: str) -> Parameter | None:
        """Return the parameter with this name, or None if the method has no such parameter."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)

"""Define merge methods: a declared contract, fold passes that reduce blocks to a few numbers, and a map.

A method never sees a whole tensor. Its ``steps`` is a generator. It yields :class:`Fold` passes. Each runs over all
blocks of the tensor, and ``yield`` returns its combined result. A method that needs matrices yields a :class:`Solve`
between them. At the end it returns the :class:`Map` that turns one block of inputs into one block of output::

    def steps(task):
        norms = yield fold_sums(lambda block: block.grain_sums(block.inputs**2))   # → [inputs] float64
        scale = 1 / norms.sum()
        return Map(lambda block: (block.inputs * scale).sum(0))

The functions take a :class:`Block` (torch, any device) and are the readable reference. Each may have a fused
counterpart for the CPU, which takes a :class:`StoredBlock`, works directly on the stored numbers and must give the same
result.

Every reduction is per *grain*, which is a fixed run of elements or a row. Grains are combined in order, so results
depend neither on the block size nor on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array: TypeAlias = NDArray[Any]
Scalar: TypeAlias = bool | int | float | str
Values: TypeAlias = Mapping[str, Any]

# Number of elements per reduction for methods that do not need rows. It is below torch's own parallel threshold
# (32768), so that the order of additions inside a grain never changes.
GRAIN = 16384

REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method.

    Args:
        name: Name in the recipe.
        kind: Type of the value.
        scope: ``shared``: one value per output tensor. ``input``: one per model, including the base. ``non_base``: one
            per model except the base.
        default: Value if the recipe has none. ``REQUIRED`` means that the recipe must set it.
        summary: One-line description for users.
        minimum, maximum: Inclusive range. None means unbounded.
        choices: Allowed texts of a ``choice``. For a ``switch``, the texts that are allowed besides true and false.
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
        """Allowed values as text: ``0 to 1``, ``from 1``, ``sum, count``. Empty if every value is allowed."""
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
    """Second moments of the inputs of a matrix, measured on a text: the mean of ``x x'`` over its positions."""

    @property
    def width(self) -> int:
        """Number of inputs of the matrix (``in``)."""

    @property
    def is_diagonal(self) -> bool:
        """Whether only the diagonal, the mean squares, was measured."""

    def read(self) -> Array:
        """Return the moments in float64: symmetric ``[in, in]``, or ``[in]`` if only the diagonal was measured."""


@dataclass(frozen=True)
class TensorTask:
    """One output tensor, as a method sees it.

    Args:
        name: Name of the output tensor.
        shape: Shape of the output tensor.
        dtype: Data type of the arithmetic: ``float64`` if an input has that type, else ``float32``.
        has_base: Whether input 0 is the base.
        shared: Values of the shared parameters.
        per_input: Values of the other parameters, one mapping per input. The base comes first if there is one.
        seeds: One key per input for :mod:`merge_core.methods.masks`.
        is_projection: Whether the tensor is the matrix ``[out, in]`` of a linear layer inside a layer of the network.
        inputs_first: Whether that matrix is stored as ``[in, out]``.
        moments: Second moments of each input's activations, or None if they were not measured.
        has_importance: Whether blocks carry the importance of each element of each model.
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
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Number of inputs of a matrix."""
        return self.shape[0] if self.inputs_first else self.shape[-1]

    def model_values(self, name: str) -> list[float]:
        """Return the values of the per-input parameter ``name`` for all inputs except the base."""
        return [float(values[name]) for values in self.per_input[1 if self.has_base else 0 :]]

    @property
    def model_seeds(self) -> tuple[tuple[int, int], ...]:
        """Keys of all inputs except the base."""
        return self.seeds[1 if self.has_base else 0 :]

    @property
    def model_moments(self) -> tuple[InputMoments, ...]:
        """Moments of all inputs except the base. Empty unless every model has them."""
        moments = self.moments[1 if self.has_base else 0 :]
        measured = tuple(item for item in moments if item is not None)
        return measured if len(measured) == len(moments) else ()


@dataclass(frozen=True)
class Block:
    """A run of elements of all inputs, flattened.

    Args:
        inputs: ``[inputs, elements]`` in the data type of the arithmetic. Row 0 is the base if the task has one.
        start: Index of the first element in the flattened tensor.
        grain: Number of elements in a grain, the unit of ``counts``. ``start`` is a multiple of it.
        importance: ``[models, elements]``, zero or more: importance of each element of each model except the base. None
            unless the task has importance.
    """

    inputs: torch.Tensor
    start: int
    grain: int
    importance: torch.Tensor | None = None

    @property
    def base(self) -> torch.Tensor:
        """Elements of the base, ``[elements]``."""
        return self.inputs[0]

    def deltas(self) -> torch.Tensor:
        """Return the task vectors ``[models, elements]``: every other input minus the base."""
        return self.inputs[1:] - self.inputs[0]

    def grains(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape ``[..., elements]`` to ``[..., grains, grain]``. The last grain is padded with zeros."""
        from torch.nn.functional import pad

        short = -values.shape[-1] % self.grain
        filled = pad(values, (0, short)) if short else values
        return filled.reshape(*values.shape[:-1], -1, self.grain)

    def grain_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return float64 sums over each grain, ``[..., elements]`` → ``[grains, ...]``, for :func:`fold_sums`."""
        return self.grains(values.double()).sum(-1).movedim(-1, 0)


def add_in_order(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the vectors from left to right. ``torch.sum`` may use another order, which would change the result."""
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    return total


@dataclass(frozen=True)
class StoredBlock:
    """A run of elements of all inputs as a fused kernel sees it: stored numbers in one flat array.

    Args:
        data: Contiguous 1-D array: uint16 (bit patterns of bfloat16), float32 or float64.
        rows: Start of each input in ``data``. The base comes first if the task has one.
        length: Elements per input.
        start: Index of the first element in the flattened tensor.
        grain: Number of elements in a grain, the unit of ``counts``.
    """

    data: Array
    rows: NDArray[np.int64]
    length: int
    start: int
    grain: int


def load_kernels() -> Any:
    """Return the module of the fused kernels. The import is deferred because numba takes a second to load."""
    from mergegate.merge_core.methods import kernels

    return kernels


@dataclass(frozen=True)
class Fold:
    """One pass over all blocks that reduces them to a few numbers.

    Use :func:`fold_sums`, :func:`fold_counts` or :func:`fold_grains` to create one.

    Args:
        reduce_block: Function that computes the partial result of a block.
        combine: Function that combines the partial results, in block order, into the result of the pass.
        reduce_stored: Fused counterpart of ``reduce_block`` for stored numbers on the CPU.
        eager: Whether partial results may be combined in any order as they arrive, so that few are held in memory.
        sample_count: Number of sampled pieces, spread over the tensor, that the pass reads instead of all blocks. The
            tensor must have at least one piece of ``GRAIN`` elements. Use it only for guesses: no result may depend on
            it. Default: 0, a full pass.
        in_order: Whether blocks must arrive one after the other, so that ``reduce_block`` can accumulate them.
    """

    reduce_block: Callable[[Block], torch.Tensor]
    combine: Callable[[Sequence[Array]], Array]
    reduce_stored: Callable[[StoredBlock], Array] | None = None
    eager: bool = False
    sample_count: int = 0
    in_order: bool = False


@dataclass(frozen=True)
class Solve:
    """A computation with matrices between two passes. Torch runs it in one thread, so that sums have one order.

    Args:
        compute: Function of the device that holds the blocks. ``yield`` returns its result.
    """

    compute: Callable[[str], Any]


@dataclass(frozen=True)
class Map:
    """The last pass, which turns a block of inputs into a block of output.

    Args:
        map_block: Function that returns ``[elements]`` in the data type of the arithmetic.
        map_stored: Fused counterpart for stored numbers on the CPU. It writes into its second argument: uint16
            (bfloat16 bit patterns), float32 or float64.
    """

    map_block: Callable[[Block], torch.Tensor]
    map_stored: Callable[[StoredBlock, Array], None] | None = None


Steps: TypeAlias = Generator[Fold | Solve, Any, Map]


def map_only(create_map: Callable[[TensorTask], Map]) -> Callable[[TensorTask], Steps]:
    """Return the steps of a method that needs no fold pass, from the function that creates its map."""

    def steps(task: TensorTask) -> Steps:
        return create_map(task)
        yield  # This makes the function a generator.

    return steps


def row_length(shape: tuple[int, ...], shared_values: Values) -> int:
    """Return the grain of methods that work on rows: the last dimension. A one-dimensional tensor is one row."""
    return max(shape[-1], 1) if shape else 1


def fold_sums(
    reduce_block: Callable[[Block], torch.Tensor], reduce_stored: Callable[[StoredBlock], Array] | None = None
) -> Fold:
    """Return a pass whose blocks give float64 ``[grains, ...]`` and whose result is the sum over all grains."""
    return Fold(reduce_block, lambda parts: np.sum(np.concatenate(parts), axis=0), reduce_stored)


def fold_counts(
    reduce_block: Callable[[Block], torch.Tensor], reduce_stored: Callable[[StoredBlock], Array] | None = None
) -> Fold:
    """Return a pass whose blocks give integer arrays of one shape and whose result is their sum."""

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
    """Return a pass whose blocks give ``[grains, ...]`` and whose result is the concatenation of all grains."""
    return Fold(reduce_block, np.concatenate, reduce_stored)


@dataclass(frozen=True)
class Costs:
    """Computational cost of a method, for the estimate before a merge.

    Arithmetic is counted in units of one plain loop: widen a bfloat16 number, multiply it, add it. Timing that loop for
    a moment therefore predicts the speed of every method on a machine. ``benchmarks/method_costs.py`` measures the
    costs.

    Args:
        map: Units of the map, per input element.
        fold: Units of one fold pass, per input element.
        folds: Number of fold passes over a tensor. If it depends on the weights (are there equal magnitudes?), use the
            larger number, because bfloat16 weights have many ties.
        products: Floating-point operations of matrix products and decompositions in float64, for a whole tensor. None
            for methods that do not work on matrices.
        held_bytes: Peak number of bytes that a tensor needs in addition to its blocks while it is processed. None for
            methods that do not work on matrices.
    """

    map: float
    fold: float = 0.0
    folds: Callable[[TensorTask], int] = field(default=lambda task: 0, repr=False)
    products: Callable[[TensorTask], float] | None = field(default=None, repr=False)
    held_bytes: Callable[[TensorTask], int] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ConflictRemedy:
    """How to change a recipe to a method that resolves opposing task vectors, and the reason to give.

    Args:
        reason: Clause that describes the effect of the method and follows its name: ``keeps the largest and lets the
            stronger sign win``.
        settings: Parameters that the changed recipe sets.
        additions: Parameters that it sets only if the previous method had none of that name.
    """

    reason: str
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    additions: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Traits:
    """Properties of a method that other packages need, so that they do not have to know any method by name.

    Args:
        adds_up: Whether opposing elements of task vectors are added up and cancel.
        sparse: Whether the method keeps only a share of each task vector, set by the parameter ``density``.
        may_zero: Whether its parameters can scale a tensor to zero, so that a tensor of zeros may be intended.
        merges_base: Whether the base is merged like a model instead of only being the origin of task vectors.
        adapters: How adapters on one base can be merged into an adapter: as a ``sum`` of their products, which is
            lossless, or only on the ``products`` themselves. None: the result depends on more than the differences from
            the base.
        conflict_remedy: Set if changing to this method helps when task vectors oppose each other.
        first_draft: Clause that describes the method. Set for the two methods that ``init`` writes a first recipe with,
            one with and one without a base. Empty for all others.
        reads_text: Quantity that is measured for each model on its own calibration text: the inputs of its matrices
            (:class:`InputMoments`), or the importance of its elements (:attr:`Block.importance`).
        weights_by_distance: Whether the weights of the models follow from the distances between them.
        first_state: Position from which the models are not models but states that an optimizer carries from merge to
            merge, in the shape of a model. None: all are models.
        makes_state: Whether the output is such a state instead of a model. It may be of any size.
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
    first_state: int | None = None
    makes_state: bool = False


@dataclass(frozen=True)
class Method:
    """A merge method: its contract and its computation.

    Args:
        name: Name in a recipe's ``merge_method``.
        summary: One-line description for users.
        paper: Reference of the publication.
        base: ``required``: input 0 is the base. ``optional``: input 0 is the base if the recipe has one. ``ordinary``:
            a base is one more input like the others. ``donor``: a base that is not among the models only provides the
            config and the tokenizer; a base among them comes first.
        models: Minimum and maximum number of inputs besides the base. A maximum of None means any number.
        parameters: Parameters that a recipe may set.
        steps: The computation; see the module docstring.
        grain: Elements per grain for a shape and the shared values. Blocks are whole grains, which are rows for some
            methods.
        single_input: Treatment of a tensor that only one input has: ``copy`` it, or ``compute`` with the available
            inputs.
        check: Function that raises InvalidInput, for a location, if the values of one tensor do not fit together.
        costs: Costs for the estimate. None: not measured, so the estimate uses assumed costs and mentions it.
        traits: Properties for health checks and remedies.
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

    def parameter(self, name: str) -> Parameter | None:
        """Return the parameter of that name, or None."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)

"""What a merge method is: a declared contract, fold passes that reduce blocks to a few numbers, a map over blocks.

A method never sees a whole tensor. Its ``steps`` is a generator: it yields :class:`Fold` passes (each runs over all
blocks of the tensor; the combined result comes back from ``yield``), where they need matrices a :class:`Solve` between
them, and returns the :class:`Map` that turns one block of inputs into one block of output::

    def steps(task):
        norms = yield fold_sums(lambda block: block.grain_sums(block.inputs**2))   # → [inputs] float64
        scale = 1 / norms.sum()
        return Map(lambda block: (block.inputs * scale).sum(0))

The functions get :class:`Block` (torch, any device): the readable reference. Each may carry a ``fused`` counterpart
for the CPU that works on the stored bytes directly and must give the same result.

Every reduction is per *grain* (a fixed run of elements, or a row), and grains are combined in their order: results do
not depend on block size or number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

Scalar: TypeAlias = bool | int | float | str
Values: TypeAlias = Mapping[str, Any]

# Elements reduced in one go when a method does not need rows. Below torch's own parallel threshold (32768), so that
# the order of additions inside a grain is always the same.
GRAIN = 16384

REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method.

    Args:
        name: As written in a recipe.
        kind: Type of its value.
        scope: ``shared``: one value per output tensor; ``input``: one per model, the base included; ``non_base``: one
            per model except the base.
        default: Value when the recipe has none; ``REQUIRED`` means that it must.
        minimum, maximum: Inclusive range, None is unbounded.
        choices: Allowed texts of a ``choice``; for a ``switch`` (a boolean with further texts) the further texts.
        summary: One line for people.
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
        """``0 to 1``, ``from 1``, ``sum, count``; empty when anything goes."""
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
    """Second moments of what a matrix is multiplied with, on a text: the mean of ``x x'`` over its positions."""

    @property
    def width(self) -> int:
        """``in``."""

    @property
    def is_diagonal(self) -> bool:
        """Whether only the squares are known."""

    def read(self) -> Array:
        """float64, symmetric ``[in, in]``; ``[in]`` where only the squares are known."""


@dataclass(frozen=True)
class TensorTask:
    """One output tensor, as a method sees it.

    Args:
        name: Output tensor name.
        shape: Its shape.
        dtype: Of the arithmetic: ``float32``, or ``float64`` when an input is.
        has_base: Whether input 0 is the base.
        shared: Values of the shared parameters.
        per_input: Values of the other parameters, one mapping per input (the base's first, when there is one).
        seeds: One key per input for :mod:`merge_core.methods.masks`.
        is_projection: Whether it is the matrix ``[out, in]`` of a linear layer inside a layer of the network.
        inputs_first: Whether that matrix lies as ``[in, out]``.
        moments: Of each input, what its matrix is multiplied with; None where that has not been measured.
        has_importance: Whether blocks say how much each element of each model matters.
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
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def width(self) -> int:
        """Of a matrix: how many numbers flow into it."""
        return self.shape[0] if self.inputs_first else self.shape[-1]

    def column(self, name: str) -> list[float]:
        """Values of the per-input parameter ``name``, for the inputs that are not the base."""
        return [float(values[name]) for values in self.per_input[1 if self.has_base else 0 :]]

    @property
    def model_seeds(self) -> tuple[tuple[int, int], ...]:
        """Keys of the inputs that are not the base."""
        return self.seeds[1 if self.has_base else 0 :]

    @property
    def model_moments(self) -> tuple[InputMoments, ...]:
        """Moments of the inputs that are not the base; empty unless those of each are known."""
        found = self.moments[1 if self.has_base else 0 :]
        known = tuple(one for one in found if one is not None)
        return known if len(known) == len(found) else ()


@dataclass(frozen=True)
class Block:
    """A run of elements of all inputs, flattened.

    Args:
        inputs: ``[inputs, elements]`` in the dtype of the arithmetic; the base is row 0 when the task has one.
        start: Index of the first element in the flattened tensor.
        grain: Elements per grain; ``start`` is a multiple of it.
        importance: ``[models, elements]``, from 0: how much each element of each model that is not the base matters;
            None unless the task says that it is known.
    """

    inputs: torch.Tensor
    start: int
    grain: int
    importance: torch.Tensor | None = None

    @property
    def base(self) -> torch.Tensor:
        """``[elements]`` of the base."""
        return self.inputs[0]

    def deltas(self) -> torch.Tensor:
        """Task vectors ``[models, elements]``: every other input minus the base."""
        return self.inputs[1:] - self.inputs[0]

    def grains(self, values: torch.Tensor) -> torch.Tensor:
        """``[..., elements]`` → ``[..., grains, grain]``, the last grain filled up with zeros."""
        from torch.nn.functional import pad

        short = -values.shape[-1] % self.grain
        filled = pad(values, (0, short)) if short else values
        return filled.reshape(*values.shape[:-1], -1, self.grain)

    def grain_sums(self, values: torch.Tensor) -> torch.Tensor:
        """``[..., elements]`` → ``[grains, ...]``: float64 sums over each grain, for :func:`fold_sums`."""
        return self.grains(values.double()).sum(-1).movedim(-1, 0)


def add_in_order(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Left to right, not ``torch.sum``: the order of additions is part of the result."""
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    return total


@dataclass(frozen=True)
class StoredBlock:
    """A run of elements of all inputs as a fused kernel gets it: stored numbers, one flat array.

    Args:
        data: 1-D, contiguous: uint16 (bit patterns of bfloat16), float32 or float64.
        rows: Start of each input in ``data``; the base first when the task has one.
        length: Elements per input.
        start: Index of the first element in the flattened tensor.
        grain: Elements per grain.
    """

    data: Array
    rows: NDArray[np.int64]
    length: int
    start: int
    grain: int


@dataclass(frozen=True)
class Fold:
    """One pass over all blocks that ends in a few numbers.

    Made by :func:`fold_sums`, :func:`fold_counts` or :func:`fold_grains`.

    Args:
        of: Partial result of a block.
        combine: Partial results in block order → result of the pass.
        eager: Whether partial results may be combined as they come, in any order, so that few are held.
        fused: Counterpart of ``of`` for stored numbers on the CPU.
        glance: Not a whole pass, but a look at so many pieces (see :func:`sampled_pieces`), spread over the tensor. For
            guesses, on which no result may depend.
        in_order: The blocks come one after the other, so that ``of`` may add each to what it holds.
    """

    of: Callable[[Block], torch.Tensor]
    combine: Callable[[Sequence[Array]], Array]
    fused: Callable[[StoredBlock], Array] | None = None
    eager: bool = False
    glance: int = 0
    in_order: bool = False


def sampled_pieces(numel: int, grain: int, glance: int) -> tuple[int, list[int]]:
    """Elements of a piece, all whole grains, and the numbers of the pieces that a glance is at.

    The tensor has one whole piece at least.
    """
    piece = max(1, GRAIN // grain) * grain
    whole = numel // piece
    return piece, sorted({(2 * place + 1) * whole // (2 * glance) for place in range(glance)})


@dataclass(frozen=True)
class Solve:
    """What is worked out between two passes with matrices, by torch in one thread: sums there have one order.

    Args:
        of: Of the device that the blocks are on; its result comes back from ``yield``.
    """

    of: Callable[[str], Any]


@dataclass(frozen=True)
class Map:
    """The last pass: a block of inputs → ``[elements]`` of output, in the dtype of the arithmetic.

    The fused counterpart writes into its second argument: uint16 (bfloat16 bit patterns), float32 or float64.
    """

    of: Callable[[Block], torch.Tensor]
    fused: Callable[[StoredBlock, Array], None] | None = None


Steps: TypeAlias = Generator[Fold | Solve, Any, Map]


def row_length(shape: tuple[int, ...], shared: Values) -> int:
    """Grain of methods that look at rows: the last dimension (a tensor of one dimension is one row)."""
    return max(shape[-1], 1) if shape else 1


def fold_sums(of: Callable[[Block], torch.Tensor], fused: Callable[[StoredBlock], Array] | None = None) -> Fold:
    """A pass whose blocks give float64 ``[grains, ...]`` and whose result is their sum over all grains."""

    def combine(parts: Sequence[Array]) -> Array:
        import numpy as np

        total: Array = np.sum(np.concatenate(parts), axis=0)
        return total

    return Fold(of, combine, fused)


def fold_counts(of: Callable[[Block], torch.Tensor], fused: Callable[[StoredBlock], Array] | None = None) -> Fold:
    """A pass whose blocks give integer arrays of one shape and whose result is their sum."""

    def combine(parts: Sequence[Array]) -> Array:
        if len(parts) == 1:
            return parts[0]
        total = parts[0].astype("int64")
        for part in parts[1:]:
            total += part
        return total

    return Fold(of, combine, fused, eager=True)


def fold_grains(of: Callable[[Block], torch.Tensor], fused: Callable[[StoredBlock], Array] | None = None) -> Fold:
    """A pass whose blocks give ``[grains, ...]`` and whose result is all grains in their order."""

    def combine(parts: Sequence[Array]) -> Array:
        import numpy as np

        return np.concatenate(parts)

    return Fold(of, combine, fused)


@dataclass(frozen=True)
class Costs:
    """What the computation of a method takes, for the estimate before a merge.

    Arithmetic is counted in units of one plain loop (widen a bfloat16 number, multiply it, add it), so that timing that
    loop for a moment tells the speed of every method on a machine. ``benchmarks/method_costs.py`` measures them.

    Args:
        map: Units of the map, per input element.
        fold: Units of one fold pass, per input element.
        folds: Number of fold passes over a tensor. Where it depends on the weights (are there equal magnitudes?), the
            larger one: bfloat16 weights have many.
        products: Operations of matrix products and decompositions in float64, of a whole tensor. Of methods that work
            on matrices only; of all others None.
        held: Bytes that a tensor holds while it is in work, beside its blocks, at the peak. Of the same methods.
    """

    map: float
    fold: float = 0.0
    folds: Callable[[TensorTask], int] = field(default=lambda task: 0, repr=False)
    products: Callable[[TensorTask], float] | None = field(default=None, repr=False)
    held: Callable[[TensorTask], int] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ConflictRemedy:
    """Why, and how, to change to a method when another adds up task vectors that oppose each other.

    Args:
        because: What it does instead, after its name: ``keeps the largest and lets the stronger sign win``.
        settings: Parameters that the changed recipe sets.
        additions: Parameters that it sets only if the method before had none of that name.
    """

    because: str
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    additions: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Traits:
    """What rules outside this package ask about a method, so that none of them knows it by name.

    Args:
        adds_up: Opposed elements of task vectors are added up, and cancel.
        sparse: It keeps a share of each task vector, its parameter ``density``.
        may_zero: Its parameters can scale a tensor to zero: a tensor of zeros may be what was asked for.
        merges_base: The base is merged like a model, not only what task vectors are measured from.
        adapters: Adapters on one base can be merged into an adapter: as a ``sum`` of their products, which needs no
            loss, or only on the ``products`` themselves. None: the result hangs on more than differences to the base.
        conflict_remedy: Given when changing to it helps where task vectors oppose each other.
        first_draft: What it does, in a clause, of the method that a first recipe is written with: one that needs a
            base, and one that does not; empty of all others.
        reads_text: What each model has to show on a text of its own: what flows into its matrices
            (:class:`InputMoments`), or how much each of its elements matters (:attr:`Block.importance`).
        by_distance: The weights of models follow from how far they are from each other.
        states_from: Position from which its models are none, but what an optimizer keeps from merge to merge in their
            shape. None: all of them are models.
        makes_state: What it makes is no model either: it may be of any size.
    """

    adds_up: bool = False
    sparse: bool = False
    may_zero: bool = False
    merges_base: bool = False
    adapters: Literal["sum", "products"] | None = None
    conflict_remedy: ConflictRemedy | None = None
    first_draft: str = ""
    reads_text: Literal["moments", "importance"] | None = None
    by_distance: bool = False
    states_from: int | None = None
    makes_state: bool = False


@dataclass(frozen=True)
class Method:
    """A merge method: contract and computation.

    Args:
        name: As written in a recipe's ``merge_method``.
        summary: One line for people.
        paper: Where it comes from.
        base: ``required``: input 0 is the base. ``optional``: it is when the recipe has one. ``ordinary``: a base is
            one more input like the others. ``donor``: a base that is not among the models only gives config and
            tokenizer; a base among them comes first.
        models: Fewest and most inputs beside the base (None: any number).
        parameters: What a recipe may set.
        steps: The computation, see the module docstring.
        grain: Elements per grain for a shape and the shared values; blocks are whole grains (rows, for some methods).
        alone: What to do with a tensor that only one input has: ``copy`` it, or ``compute`` with what is there.
        check: Raises InvalidInput (``where`` is given) when the values of one tensor do not fit together.
        costs: For the estimate; None: not measured, so the estimate assumes some and says so.
        traits: For health checks and remedies.
    """

    name: str
    summary: str
    paper: str
    base: Literal["required", "optional", "ordinary", "donor"]
    models: tuple[int, int | None]
    parameters: tuple[Parameter, ...]
    steps: Callable[[TensorTask], Steps] = field(repr=False)
    grain: Callable[[tuple[int, ...], Values], int] = field(default=lambda shape, shared: GRAIN, repr=False)
    alone: Literal["copy", "compute"] = "compute"
    check: Callable[[Values, Sequence[Values], str], None] = field(default=lambda *_: None, repr=False)
    costs: Costs | None = field(default=None, repr=False)
    traits: Traits = field(default=Traits(), repr=False)

    def parameter(self, name: str) -> Parameter | None:
        """The parameter of that name."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)

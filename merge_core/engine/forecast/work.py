"""Compute the work for one output tensor: the number of passes over its inputs, and the arithmetic.

Each method declares its own costs (:class:`merge_core.methods.Costs`), and this module adds them up. The unit is the
plain loop of :func:`merge_core.engine.forecast.probe.reference_pass`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mergegate.merge_core.methods import Method, TensorTask

# Units per input element of a method that declares no costs: between those of plain and selecting methods, with one
# fold.
_ASSUMED_UNITS = 3.0 + 5.0
# Units per element to copy a tensor that only one model has.
_COPY_UNITS = 0.6


@dataclass(frozen=True)
class Work:
    """The computation of one output tensor.

    Args:
        folds: Maximum number of passes over all inputs before the last one.
        units: Arithmetic of all passes, in units per input element.
        is_measured: Whether the method's cost was measured, as opposed to assumed.
        products: Operations of float64 matrix products and decompositions.
        held: Bytes held in addition to its blocks.
    """

    folds: int
    units: float
    is_measured: bool = True
    products: float = 0.0
    held: int = 0

    @property
    def passes(self) -> int:
        """Number of passes over the inputs."""
        return self.folds + 1


COPY = Work(0, _COPY_UNITS)


def work_of(method: Method, task: TensorTask) -> Work:
    """Return the computation of the tensor ``task`` by ``method``."""
    costs = method.costs
    if costs is None:
        return Work(1, _ASSUMED_UNITS, is_measured=False)
    folds = costs.folds(task)
    products = costs.products(task) if costs.products else 0.0
    return Work(
        folds, folds * costs.fold + costs.map, products=products, held=costs.held_bytes(task) if costs.held_bytes else 0
    )

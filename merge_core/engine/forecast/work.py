"""The computation of one output tensor: how often its inputs are gone over, and how much arithmetic that takes.

A method declares its own costs (:class:`merge_core.methods.Costs`); here they are only added up. The unit is the plain
loop of :func:`merge_core.engine.forecast.probe.reference_pass`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mergegate.merge_core.methods import Method, TensorTask

# Units per input element of a method that declares no costs: between the plain and the selecting ones, with one fold.
_ASSUMED_UNITS = 3.0 + 5.0
# Copying a tensor that only one model has.
_COPY_UNITS = 0.6


@dataclass(frozen=True)
class Work:
    """The computation of one output tensor.

    Args:
        folds: Passes over all inputs before the last one, at most.
        units: Arithmetic of all passes, in units per input element.
        known: Whether the method's cost was measured, or assumed.
        products: Operations of matrix products and decompositions in float64.
        held: Bytes held beside its blocks.
    """

    folds: int
    units: float
    known: bool = True
    products: float = 0.0
    held: int = 0

    @property
    def passes(self) -> int:
        """How often the inputs are gone over."""
        return self.folds + 1


COPY = Work(0, _COPY_UNITS)


def work_of(method: Method, task: TensorTask) -> Work:
    """The computation of the tensor ``task`` by ``method``."""
    costs = method.costs
    if costs is None:
        return Work(1, _ASSUMED_UNITS, known=False)
    folds = costs.folds(task)
    products = costs.products(task) if costs.products else 0.0
    return Work(folds, folds * costs.fold + costs.map, products=products, held=costs.held(task) if costs.held else 0)

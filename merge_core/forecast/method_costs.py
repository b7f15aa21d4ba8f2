"""What a method costs per element: how often it goes over a tensor, and how much arithmetic each time.

Arithmetic is counted in units of one plain loop (:func:`merge_core.forecast.probe.reference_pass`: widen a bfloat16,
multiply, add), so that measuring that loop for a moment tells the speed of all methods on a machine. The table was
measured with ``benchmarks/method_costs.py`` on the kernels that the engine takes on a CPU; it is an estimate for other
machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merge_core.methods import DIGITS, Method

# Units per input element: (each fold pass, the map).
_UNITS = {
    "arcee_fusion": (5.2, 0.4),
    "breadcrumbs": (1.5, 2.8),
    "breadcrumbs_ties": (1.5, 2.8),
    "dare_linear": (2.3, 2.6),
    "dare_ties": (2.3, 2.7),
    "della": (14.0, 14.8),
    "della_linear": (14.0, 14.8),
    "karcher": (1.8, 0.5),
    "linear": (0.0, 0.6),
    "model_stock": (1.4, 0.6),
    "multislerp": (1.9, 0.4),
    "nearswap": (0.0, 0.5),
    "nuslerp": (1.0, 0.4),
    "passthrough": (0.0, 0.5),
    "ram": (0.0, 1.4),
    "ramplus_tl": (1.0, 1.2),
    "sce": (2.0, 2.3),
    "slerp": (1.0, 0.4),
    "task_arithmetic": (0.0, 1.5),
    "ties": (1.2, 2.6),
}
# A method of another package: between the plain and the selecting ones.
_UNKNOWN = (3.0, 5.0)
# Copying a tensor that only one model has.
COPY_UNITS = 0.6

_BY_MAGNITUDE = ("ties", "breadcrumbs", "breadcrumbs_ties")
_AT_RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")
_ON_A_SPHERE = ("slerp", "multislerp", "karcher")


@dataclass(frozen=True)
class Work:
    """The computation of one output tensor.

    Args:
        folds: Passes over all inputs before the last one. Where their number depends on the weights (are there equal
            magnitudes?), the larger one: bfloat16 weights have many.
        units: Arithmetic of all passes, in units per input element.
        known: Whether the method's cost was measured, or assumed.
    """

    folds: int
    units: float
    known: bool = True

    @property
    def passes(self) -> int:
        """How often the inputs are gone over."""
        return self.folds + 1


COPY = Work(0, COPY_UNITS)


def work_of(
    method: Method,
    shape: tuple[int, ...],
    shared: Mapping[str, Any],
    per_input: Sequence[Mapping[str, Any]],
    wide: bool,
) -> Work:
    """The computation of a tensor by ``method``.

    Args:
        method: The merge method.
        shape: Shape of the output.
        shared: Values of its shared parameters.
        per_input: Values of its other parameters, one mapping per input.
        wide: Whether the arithmetic is float64.
    """
    if method.name not in _UNITS:
        return Work(1, sum(_UNKNOWN), known=False)
    folds = _folds(method.name, shape, shared, per_input, len(DIGITS["float64" if wide else "float32"]))
    fold, last = _UNITS[method.name]
    return Work(folds, folds * fold + last)


def _folds(
    name: str,
    shape: tuple[int, ...],
    shared: Mapping[str, Any],
    per_input: Sequence[Mapping[str, Any]],
    digits: int,
) -> int:
    # Finding the k largest takes a pass per digit and one that numbers the equal ones.
    selecting = digits + 1
    if name in (*_BY_MAGNITUDE, *_AT_RANDOM):
        if not any(0 < values.get("density", 1.0) < 1 for values in per_input):
            return 0
        rescaling = 1 if shared["rescale"] is True else 0
        return rescaling + (selecting if name in _BY_MAGNITUDE else 0)
    if name in _ON_A_SPHERE:
        weighted = sum("weight" in values for values in per_input) if name == "multislerp" else len(per_input)
        return 1 if weighted > 1 else 0
    if name == "nuslerp":
        columns = shared["nuslerp_row_wise"] and len(shape) > 1
        return 1 if shared["nuslerp_flatten"] or columns else 0
    if name == "sce":
        # Which elements vary, the selection among them, and the energy of each model.
        return 1 + (1 + selecting if shared["select_topk"] < 1 else 0)
    if name == "model_stock":
        return 0 if shared["filter_wise"] else 1
    if name == "arcee_fusion":
        return 1 + selecting
    return 1 if name == "ramplus_tl" else 0

"""Estimate the computation and the energy of a merge and of its evaluation.

The estimates are upper bounds from the sizes of models and samples, not measurements, so the same inputs give the same
numbers on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeEstimate:
    """Upper bounds of the computation and the energy for a release.

    Attributes:
        merge_flop: Floating-point operations of the merge, including models that read calibration texts.
        evaluation_flop: Floating-point operations of the evaluation of all models. None if nothing was evaluated.
        energy_kwh: Energy of both in kWh.
        assumptions: Sentences that explain how the numbers were computed.
    """

    merge_flop: float
    evaluation_flop: float | None
    energy_kwh: float
    assumptions: tuple[str, ...]

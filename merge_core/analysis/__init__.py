"""Measure, layer by layer, how far the parents' task vectors agree and how far the merge moved from the base."""

from mergegate.merge_core.analysis.distances import find_outliers, geometric_median, normalized_lengths_and_distances
from mergegate.merge_core.analysis.interference import NOT_FINITE, Interference, TensorGroup, measure_interference
from mergegate.merge_core.analysis.tally import Tally

__all__ = [
    "NOT_FINITE",
    "Interference",
    "Tally",
    "TensorGroup",
    "find_outliers",
    "geometric_median",
    "measure_interference",
    "normalized_lengths_and_distances",
]

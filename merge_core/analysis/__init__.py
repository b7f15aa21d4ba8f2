"""What a merge does to its parents: how their task vectors agree, and how far the merge moved, layer by layer."""

from mergegate.merge_core.analysis.distances import geometric_median, lengths_and_distances, outliers
from mergegate.merge_core.analysis.interference import NOT_FINITE, Interference, Spot, measure_interference
from mergegate.merge_core.analysis.tally import Tally

__all__ = [
    "NOT_FINITE",
    "Interference",
    "Spot",
    "Tally",
    "geometric_median",
    "lengths_and_distances",
    "measure_interference",
    "outliers",
]

"""Measure how far parents agree and how far a merge moved from the base, and find models with related weights."""

from mergegate.merge_core.analysis.fingerprint import (
    LEAST_SHARE,
    MOST_TENSORS,
    Fingerprint,
    Relation,
    RelationKind,
    compare_fingerprints,
    take_fingerprint,
)
from mergegate.merge_core.analysis.interference import (
    NOT_FINITE,
    Interference,
    Tally,
    TensorGroup,
    find_outliers,
    geometric_median,
    measure_interference,
    normalized_lengths_and_distances,
)

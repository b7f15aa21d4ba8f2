"""Merge methods: a declared contract, fold passes that reduce blocks to a few numbers, a map over blocks.

One file a family, with formula, folds, maps, costs and traits; other packages add theirs under the entry point
``mergegate.methods``.
"""

from merge_core.methods.combination import combine
from merge_core.methods.contract import (
    GRAIN,
    REQUIRED,
    Block,
    Fold,
    Map,
    Method,
    Parameter,
    Scalar,
    Steps,
    StoredBlock,
    TensorTask,
)
from merge_core.methods.masks import mask_key
from merge_core.methods.registry import find_method, merge_methods
from merge_core.methods.selection import DIGITS

__all__ = [
    "DIGITS",
    "GRAIN",
    "REQUIRED",
    "Block",
    "Fold",
    "Map",
    "Method",
    "Parameter",
    "Scalar",
    "Steps",
    "StoredBlock",
    "TensorTask",
    "combine",
    "find_method",
    "mask_key",
    "merge_methods",
]

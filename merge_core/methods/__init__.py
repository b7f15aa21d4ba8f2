"""Merge methods, one module per family. See :mod:`.contract` for what a method consists of.

Other packages can add methods under the entry point ``mergegate.methods``.
"""

from mergegate.merge_core.methods.combination import LINEAR, PASSTHROUGH, UPCYCLING, combine
from mergegate.merge_core.methods.contract import (
    GRAIN,
    REQUIRED,
    Block,
    ConflictRemedy,
    Costs,
    Fold,
    Map,
    Method,
    Parameter,
    Scalar,
    Solve,
    Steps,
    StoredBlock,
    TensorTask,
    Traits,
    fold_sums,
    map_only,
)
from mergegate.merge_core.methods.kernel_cache import has_kernels, kernel_directory, record_kernels
from mergegate.merge_core.methods.masks import mask_key
from mergegate.merge_core.methods.registry import BUILT_IN, find_method, merge_methods
from mergegate.merge_core.methods.task_vectors import TASK_ARITHMETIC

"""Fused CPU kernels: compute methods directly on stored numbers, one short tile at a time, without large temporaries.

Each kernel is the counterpart of a torch expression in the module of its method. The expression is the readable
reference, and a test compares the two. Kernels release the GIL and run on one thread each. A tile fits into the
first-level cache. Long sums have a fixed number of lanes, so they do not depend on the vector width of the processor.

Stored numbers are uint16 (bit patterns of bfloat16) or float32. Arithmetic is float32, and long sums are float64. The
arguments ``data``, ``rows``, ``length``, ``start`` and ``grain`` are those of :class:`.contract.StoredBlock`.
"""

from mergegate.merge_core.methods.kernels.elementwise import (
    add_change,
    combine,
    consensus,
    count_changes,
    fuse,
    gram,
    importances,
    nearswap,
    oppositions,
    ram,
    squares,
    trimmed_middle,
)
from mergegate.merge_core.methods.kernels.selection import (
    first_digit_of,
    first_digits,
    next_digit_of,
    next_digits,
    scan_windows,
    sizes,
    ties,
    ties_of,
)
from mergegate.merge_core.methods.kernels.task_vectors import (
    energies,
    mask_words,
    masked_norms,
    sce,
    task_vectors,
    variances,
)
from mergegate.merge_core.methods.kernels.tiles import TILE, inspect

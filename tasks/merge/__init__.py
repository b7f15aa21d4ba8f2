"""The merge stage: a recipe and its pinned parents into a checkpoint; and what must be asked of a model before it.

``stage.py`` is the stage. ``gates.py`` makes the router rows of a mixture of experts out of its prompts.
"""

from tasks.merge.gates import router_rows, with_gates
from tasks.merge.stage import (
    MERGED,
    Merged,
    MergeSettings,
    Numerics,
    RouterDistance,
    combine_parents,
    merge,
    merged_model,
    numerics,
)

__all__ = [
    "MERGED",
    "MergeSettings",
    "Merged",
    "Numerics",
    "RouterDistance",
    "combine_parents",
    "merge",
    "merged_model",
    "numerics",
    "router_rows",
    "with_gates",
]

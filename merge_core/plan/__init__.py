"""Plan a merge: turn a recipe and checkpoint headers into a list of jobs, and find problems before weights are read.

A plan fixes the name, shape, dtype and offset of every output tensor. The engine only executes it.
"""

from mergegate.merge_core.plan.compatibility import PlannedMerge, plan_with_findings, preflight
from mergegate.merge_core.plan.file_settings import serialize_config
from mergegate.merge_core.plan.jobs import (
    MEAN,
    SEVERAL,
    ZERO,
    Input,
    MergePlan,
    OutputTensor,
    RowMap,
    Shard,
    TensorJob,
    network_shards,
    requires_index,
)
from mergegate.merge_core.plan.plan import plan_merge, plan_transplant, step_of

"""Plan a merge: turn a recipe and checkpoint headers into a list of jobs, and find problems before weights are read.

A plan fixes the name, shape, dtype and offset of every output tensor. The engine only executes it.
"""

from mergegate.merge_core.plan.compatibility import PlannedMerge, plan_with_findings, preflight
from mergegate.merge_core.plan.jobs import Input, MergePlan, TensorJob
from mergegate.merge_core.plan.layout import OutputTensor, Shard, network_shards, requires_index
from mergegate.merge_core.plan.plan import plan_merge, step_of
from mergegate.merge_core.plan.rows import MEAN, SEVERAL, ZERO, RowMap
from mergegate.merge_core.plan.special_ids import serialize_config
from mergegate.merge_core.plan.transplant import plan_transplant

"""From a recipe and headers to a list of jobs, and everything that is wrong with it, before any weight is read.

A plan fixes names, shapes, dtypes and offsets of every output byte; the engine only carries it out.
"""

from mergegate.merge_core.plan.compatibility import PlannedMerge, plan_with_findings, preflight
from mergegate.merge_core.plan.jobs import Input, MergePlan, TensorJob
from mergegate.merge_core.plan.layout import OutputTensor, Shard, index_text, requires_index
from mergegate.merge_core.plan.plan import plan_merge, step_of
from mergegate.merge_core.plan.rows import MEAN, SEVERAL, ZERO, RowMap
from mergegate.merge_core.plan.special_ids import serialize_config
from mergegate.merge_core.plan.tokenizers import CutPair
from mergegate.merge_core.plan.transplant import plan_transplant

__all__ = [
    "MEAN",
    "SEVERAL",
    "ZERO",
    "CutPair",
    "Input",
    "MergePlan",
    "OutputTensor",
    "PlannedMerge",
    "RowMap",
    "Shard",
    "TensorJob",
    "index_text",
    "plan_merge",
    "plan_transplant",
    "plan_with_findings",
    "preflight",
    "requires_index",
    "serialize_config",
    "step_of",
]

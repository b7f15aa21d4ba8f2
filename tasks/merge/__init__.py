"""Merge the pinned parents of a recipe into a checkpoint, and take the measurements that the recipe needs first.

* ``stage.py``: the merge stage.
* ``preparation.py``: all measurements that a recipe needs, which are added to it.
* ``weight_comparison.py``: which tensors of a merge are new, and distances between models.
* ``gates.py``: router rows of a mixture of experts, computed from prompts.
* ``calibration.py``: calibration texts in windows and runs, with their cost. ``statistics.py`` measures inputs and
  importance with them, and ``routers.py`` fits new routers. ``products.py`` observes the network for both.
"""

from mergegate.tasks.merge.calibration import (
    RouterNeeds,
    StatisticsNeeds,
    pin_calibration_texts,
    router_needs,
    statistics_needs,
)
from mergegate.tasks.merge.preparation import (
    find_prepared_recipe,
    prepare_recipe,
    select_named_parents,
    with_new_routers,
)
from mergegate.tasks.merge.routers import RouterRepairSummary, new_routers
from mergegate.tasks.merge.stage import (
    MERGED,
    MergeSettings,
    MergeSummary,
    Numerics,
    RepairedRouting,
    RouterDistance,
    combine_parents,
    merge,
    merged_model,
    numerics,
    repaired_routing,
)
from mergegate.tasks.merge.statistics import calibration_stage_name
from mergegate.tasks.merge.weight_comparison import (
    WeightComparison,
    compare_with_parents,
    describe_changes,
    find_copied_parent,
)

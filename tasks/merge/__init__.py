"""Merge the pinned parents of a recipe into a checkpoint, and take the measurements that the recipe needs first.

* ``stage.py``: the merge stage.
* ``preparation.py``: all measurements that a recipe needs before it can be planned.
* ``gates.py``: router rows of a mixture of experts, computed from prompts.
* ``statistics.py``: statistics of a model on its calibration text. ``input_statistics.py`` and
  ``gradient_statistics.py`` compute them in the model process, with the windows and runs of ``calibration.py``.
* ``distances.py``: distances between models.
* ``weight_comparison.py``: which tensors of a merge are new, and which ones are copies of a parent's.
* ``router_repair.py``: new routers for a merged mixture of experts. ``router_fitting.py`` computes them in the model
  process, from the states that ``router_products.py`` observes.
"""

from mergegate.tasks.merge.preparation import find_prepared_recipe, prepare_recipe, select_named_parents
from mergegate.tasks.merge.router_fitting import RouterRepairSummary
from mergegate.tasks.merge.router_repair import new_routers, with_new_routers
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
from mergegate.tasks.merge.statistics import calibration_stage_name, pin_calibration_texts
from mergegate.tasks.merge.statistics_cost import RouterNeeds, StatisticsNeeds, router_needs, statistics_needs
from mergegate.tasks.merge.weight_comparison import (
    WeightComparison,
    compare_with_parents,
    describe_changes,
    find_copied_parent,
)

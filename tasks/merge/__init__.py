"""The merge stage: a recipe and its pinned parents into a checkpoint; and what must be asked of a model before it.

``stage.py`` is the stage. ``preparation.py`` has models asked beforehand what a recipe wants of them: ``gates.py``
makes the router rows of a mixture of experts out of its prompts, ``statistics.py`` measures what a model
shows on a text of its own (``reading_inputs.py`` and ``reading_gradients.py``, in the process that holds models),
``distances.py`` looks how far models are from each other. ``optimizer.py`` is the stage of what a server's optimizer
keeps of a merge for the next one.
"""

from mergegate.tasks.merge.optimizer import (
    OptimizerState,
    find_optimizer_state,
    optimizer_state,
    optimizer_state_paths,
    optimizer_steps,
)
from mergegate.tasks.merge.preparation import find_prepared_recipe, prepare_recipe, select_named_parents
from mergegate.tasks.merge.stage import (
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
from mergegate.tasks.merge.statistics import calibration_stage_name, pin_calibration_texts
from mergegate.tasks.merge.statistics_cost import StatisticsNeeds, statistics_needs

__all__ = [
    "MERGED",
    "MergeSettings",
    "Merged",
    "Numerics",
    "OptimizerState",
    "RouterDistance",
    "StatisticsNeeds",
    "calibration_stage_name",
    "combine_parents",
    "find_optimizer_state",
    "find_prepared_recipe",
    "merge",
    "merged_model",
    "numerics",
    "optimizer_state",
    "optimizer_state_paths",
    "optimizer_steps",
    "pin_calibration_texts",
    "prepare_recipe",
    "select_named_parents",
    "statistics_needs",
]

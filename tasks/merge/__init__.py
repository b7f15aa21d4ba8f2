"""The merge stage: a recipe and its pinned parents into a checkpoint; and what must be asked of a model before it.

``stage.py`` is the stage. ``preparation.py`` has models asked beforehand what a recipe wants of them: ``gates.py``
makes the router rows of a mixture of experts out of its prompts, ``statistics.py`` measures what a model
shows on a text of its own (``reading_inputs.py`` and ``reading_gradients.py``, in the process that holds models),
``distances.py`` looks how far models are from each other. ``optimizer.py`` is the stage of what a server's optimizer
keeps of a merge for the next one.
"""

from mergegate.tasks.merge.optimizer import OptimizerState, kept_names, kept_place, kept_places, optimizer_state
from mergegate.tasks.merge.preparation import prepared, prepared_before, still_named
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
from mergegate.tasks.merge.statistics import pinned_texts, stage_of_texts
from mergegate.tasks.merge.statistics_cost import StatisticsNeeds, statistics_needs

__all__ = [
    "MERGED",
    "MergeSettings",
    "Merged",
    "Numerics",
    "OptimizerState",
    "RouterDistance",
    "StatisticsNeeds",
    "combine_parents",
    "kept_names",
    "kept_place",
    "kept_places",
    "merge",
    "merged_model",
    "numerics",
    "optimizer_state",
    "pinned_texts",
    "prepared",
    "prepared_before",
    "stage_of_texts",
    "statistics_needs",
    "still_named",
]

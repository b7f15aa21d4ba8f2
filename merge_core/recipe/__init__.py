"""Parse recipes, YAML in mergekit's dialect, into frozen values, resolve parameters per tensor and derive variations.

Parsing is strict and happens once. Later code does not validate a recipe again.
"""

from mergegate.merge_core.recipe.blocks import (
    CalibrationReading,
    CalibrationRequest,
    InputMeasurements,
    RepairedRouters,
    RouterRepair,
    RowOrigin,
    TokenizerChoice,
)
from mergegate.merge_core.recipe.keys import CLIENT_KEYS, plain_mapping
from mergegate.merge_core.recipe.mixture import Expert, GateRows, Mixture
from mergegate.merge_core.recipe.parameters import Condition, Parameters, apply_overrides, fit_to_method, value_for
from mergegate.merge_core.recipe.parser import load_recipe, recipe_schema
from mergegate.merge_core.recipe.recipe import Module, Recipe, RelativeDistance, Slice, Source, select_models
from mergegate.merge_core.recipe.reference import (
    CheckpointRef,
    expand_user_path,
    name_in_path,
    parse_reference,
    resolve_local,
)
from mergegate.merge_core.recipe.training_run import (
    RunCheckpoint,
    RunSettings,
    RunWindow,
    Schedule,
    is_window_full,
    parse_amount,
    parse_run,
    part_in_name,
    run_recipe,
    schedule_weights,
    select_window,
    step_in_name,
    steps_in_names,
    tokens_in_name,
)

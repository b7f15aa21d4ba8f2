"""Sweep stage: search the free parameters of a recipe and confirm the best candidate on held-out documents.

No trial sees the documents of the confirmation. If the best candidate does not beat the hand-written recipes there, no
candidate is confirmed.
"""

from mergegate.tasks.sweep.confirmation import Confirmation, NothingToConfirm, confirm, reason_not_to_confirm
from mergegate.tasks.sweep.confirmation_power import ConfirmationPower
from mergegate.tasks.sweep.evidence import SweepEvidence, pin_sweep, trial_sets
from mergegate.tasks.sweep.evolve import profile_of_evolve
from mergegate.tasks.sweep.ledger import Ledger, open_ledger, study_key
from mergegate.tasks.sweep.objective import Term, objective_of
from mergegate.tasks.sweep.optuna_view import open_view, parameter_importances, serve_dashboard
from mergegate.tasks.sweep.race import cumulative_shares, doubling_shares
from mergegate.tasks.sweep.recipes import (
    count_layers,
    enumerate_recipes,
    recipe_text,
    reference_parent,
    relocate_recipe,
)
from mergegate.tasks.sweep.search import hand_written_recipes, search
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import make_space, recipe_key, start_recipe
from mergegate.tasks.sweep.study import HandWritten, SearchProgress, Study
from mergegate.tasks.sweep.trial import TrialSetting
from mergegate.tasks.sweep.trial_pool import PreparedSearch, TrialPool
from mergegate.tasks.sweep.trials import TEXT, MetricKey, Trial, TrialRequest, TrialScores

__all__ = [
    "TEXT",
    "Confirmation",
    "ConfirmationPower",
    "HandWritten",
    "Ledger",
    "MetricKey",
    "NothingToConfirm",
    "PreparedSearch",
    "SearchProgress",
    "Study",
    "SweepEvidence",
    "SweepSettings",
    "Term",
    "Trial",
    "TrialPool",
    "TrialRequest",
    "TrialScores",
    "TrialSetting",
    "confirm",
    "count_layers",
    "cumulative_shares",
    "doubling_shares",
    "enumerate_recipes",
    "hand_written_recipes",
    "make_space",
    "objective_of",
    "open_ledger",
    "open_view",
    "parameter_importances",
    "pin_sweep",
    "profile_of_evolve",
    "reason_not_to_confirm",
    "recipe_key",
    "recipe_text",
    "reference_parent",
    "relocate_recipe",
    "search",
    "serve_dashboard",
    "start_recipe",
    "study_key",
    "trial_sets",
]

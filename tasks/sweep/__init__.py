"""Sweep: search the free parameters of a recipe or the ingredients of a soup, and confirm the result.

No trial sees the documents of the confirmation. If the best candidate does not beat the hand-written recipes there, no
candidate is confirmed.
"""

from mergegate.tasks.sweep.confirmation import (
    Confirmation,
    IngredientResult,
    NothingToConfirm,
    SoupResult,
    confirm,
    reason_not_to_confirm,
)
from mergegate.tasks.sweep.confirmation_power import ConfirmationPower
from mergegate.tasks.sweep.evidence import SweepEvidence, pin_sweep, trial_sets
from mergegate.tasks.sweep.evolve import convert_evolve_file
from mergegate.tasks.sweep.ledger import Ledger, open_ledger, study_key
from mergegate.tasks.sweep.objective import TEXT, MetricKey, Term, make_objective
from mergegate.tasks.sweep.optuna_view import open_view, parameter_importances, serve_dashboard
from mergegate.tasks.sweep.race import cumulative_shares
from mergegate.tasks.sweep.recipes import SoupRecipe, read_soup_recipe, relocate_recipe
from mergegate.tasks.sweep.search import SearchProblem, search
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.soup import INGREDIENT, SOUP, confirm_soup, search_soup
from mergegate.tasks.sweep.space import count_layers, enumerate_recipes, make_space, recipe_key, start_recipe
from mergegate.tasks.sweep.study import HandWritten, SearchProgress, Study, Trial, TrialRequest, TrialScores
from mergegate.tasks.sweep.trial import TrialSetting
from mergegate.tasks.sweep.trial_pool import PreparedSearch, TrialPool

__all__ = [
    "INGREDIENT",
    "SOUP",
    "TEXT",
    "Confirmation",
    "ConfirmationPower",
    "HandWritten",
    "IngredientResult",
    "Ledger",
    "MetricKey",
    "NothingToConfirm",
    "PreparedSearch",
    "SearchProblem",
    "SearchProgress",
    "SoupRecipe",
    "SoupResult",
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
    "confirm_soup",
    "convert_evolve_file",
    "count_layers",
    "cumulative_shares",
    "enumerate_recipes",
    "make_objective",
    "make_space",
    "open_ledger",
    "open_view",
    "parameter_importances",
    "pin_sweep",
    "read_soup_recipe",
    "reason_not_to_confirm",
    "recipe_key",
    "relocate_recipe",
    "search",
    "search_soup",
    "serve_dashboard",
    "start_recipe",
    "study_key",
    "trial_sets",
]

"""Sweep: search the free parameters of a recipe or the ingredients of a soup, and confirm the result.

No trial sees the documents of the confirmation. If the best candidate does not beat the hand-written recipes there, no
candidate is confirmed.
"""

from mergegate.tasks.sweep.confirmation import (
    Confirmation,
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
from mergegate.tasks.sweep.recipes import read_soup_recipe, relocate_recipe
from mergegate.tasks.sweep.search import SearchProblem, search
from mergegate.tasks.sweep.settings import Budget, Racing, SweepSettings
from mergegate.tasks.sweep.soup import INGREDIENT, SOUP, confirm_soup, search_soup
from mergegate.tasks.sweep.space import (
    Coordinate,
    count_layers,
    enumerate_recipes,
    make_space,
    recipe_key,
    start_recipe,
)
from mergegate.tasks.sweep.study import HandWritten, SearchProgress, Study, Trial, TrialRequest, TrialScores
from mergegate.tasks.sweep.trial import TrialSetting
from mergegate.tasks.sweep.trial_pool import PreparedSearch, TrialPool

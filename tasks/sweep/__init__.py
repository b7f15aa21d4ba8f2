"""Sweep: search the free parameters of a recipe or the ingredients of a soup, and confirm the result.

No trial sees the documents of the confirmation. If the best candidate does not beat the hand-written recipes there, no
candidate is confirmed.
"""

from mergegate.tasks.sweep.confirmation import (
    Confirmation,
    ConfirmationPower,
    NothingToConfirm,
    confirm,
    confirm_soup,
    reason_not_to_confirm,
)
from mergegate.tasks.sweep.evolve import convert_evolve_file
from mergegate.tasks.sweep.objective import TEXT, MetricKey, Term, cumulative_shares, make_objective
from mergegate.tasks.sweep.samplers import open_view, parameter_importances, serve_dashboard
from mergegate.tasks.sweep.search import SearchProblem, search
from mergegate.tasks.sweep.settings import Budget, Racing, SweepSettings
from mergegate.tasks.sweep.space import (
    Coordinate,
    count_layers,
    enumerate_recipes,
    make_space,
    read_soup_recipe,
    recipe_key,
    relocate_recipe,
    start_recipe,
)
from mergegate.tasks.sweep.study import (
    INGREDIENT,
    SOUP,
    HandWritten,
    Ledger,
    SearchProgress,
    SoupResult,
    Study,
    Trial,
    TrialRequest,
    TrialScores,
    open_ledger,
    study_key,
)
from mergegate.tasks.sweep.trial import TrialSetting
from mergegate.tasks.sweep.trial_pool import PreparedSearch, SweepEvidence, TrialPool, pin_sweep, trial_sets

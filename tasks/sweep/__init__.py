"""A sweep: the free parameters of a recipe are searched, and the best candidate is confirmed on documents that no trial
saw, or nothing is.
"""

from mergegate.tasks.sweep.confirmation import Confirmation, Unconfirmed, confirm, nothing_to_confirm
from mergegate.tasks.sweep.confirmation_power import ConfirmationPower
from mergegate.tasks.sweep.evidence import SweepEvidence, pin_sweep, trial_sets
from mergegate.tasks.sweep.evolve import profile_of_evolve
from mergegate.tasks.sweep.ledger import Ledger, open_ledger, study_key
from mergegate.tasks.sweep.objective import Term, objective_of
from mergegate.tasks.sweep.optuna_view import open_view, parameter_importances, serve_dashboard
from mergegate.tasks.sweep.racing import doubling_looks, shares_after_looks
from mergegate.tasks.sweep.recipes import base_of, layers_among, named_by, recipe_text, relocated
from mergegate.tasks.sweep.search import hand_written_recipes, search
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import at_start, make_space, recipe_key
from mergegate.tasks.sweep.study import HandWritten, SearchProgress, Study
from mergegate.tasks.sweep.trial import TrialSetting
from mergegate.tasks.sweep.trials import TEXT, Asked, Trial, TrialRequest, TrialScores
from mergegate.tasks.sweep.workshop import PreparedSearch, Workshop

__all__ = [
    "TEXT",
    "Asked",
    "Confirmation",
    "ConfirmationPower",
    "HandWritten",
    "Ledger",
    "PreparedSearch",
    "SearchProgress",
    "Study",
    "SweepEvidence",
    "SweepSettings",
    "Term",
    "Trial",
    "TrialRequest",
    "TrialScores",
    "TrialSetting",
    "Unconfirmed",
    "Workshop",
    "at_start",
    "base_of",
    "confirm",
    "doubling_looks",
    "hand_written_recipes",
    "layers_among",
    "make_space",
    "named_by",
    "nothing_to_confirm",
    "objective_of",
    "open_ledger",
    "open_view",
    "parameter_importances",
    "pin_sweep",
    "profile_of_evolve",
    "recipe_key",
    "recipe_text",
    "relocated",
    "search",
    "serve_dashboard",
    "shares_after_looks",
    "study_key",
    "trial_sets",
]

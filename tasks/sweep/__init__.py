"""A sweep: the free parameters of a recipe are searched, and the best candidate is confirmed on documents that no trial
saw, or nothing is.
"""

from tasks.sweep.batch import ScoreAll, score_once
from tasks.sweep.confirmation import Confirmation, Unconfirmed, confirm, nothing_to_confirm
from tasks.sweep.confirmation_power import ConfirmationPower, confirmation_power
from tasks.sweep.evolve import Converted, NotCarried, profile_of_evolve
from tasks.sweep.ledger import Ledger, open_ledger, study_key
from tasks.sweep.objective import HAND_WRITTEN, Objective, objective_of
from tasks.sweep.optuna_view import Importances, StudyView, open_view, parameter_importances, serve_dashboard
from tasks.sweep.racing import Race, doubling_looks
from tasks.sweep.search import hand_written_recipes, score_hand_written, search
from tasks.sweep.settings import SweepSettings
from tasks.sweep.space import Space, make_space, recipe_key
from tasks.sweep.study import HandWritten, SearchProgress, Study
from tasks.sweep.trials import Asked, Sheet, Trial, TrialRequest, TrialScores

__all__ = [
    "HAND_WRITTEN",
    "Asked",
    "Confirmation",
    "ConfirmationPower",
    "Converted",
    "HandWritten",
    "Importances",
    "Ledger",
    "NotCarried",
    "Objective",
    "Race",
    "ScoreAll",
    "SearchProgress",
    "Sheet",
    "Space",
    "Study",
    "StudyView",
    "SweepSettings",
    "Trial",
    "TrialRequest",
    "TrialScores",
    "Unconfirmed",
    "confirm",
    "confirmation_power",
    "doubling_looks",
    "hand_written_recipes",
    "make_space",
    "nothing_to_confirm",
    "objective_of",
    "open_ledger",
    "open_view",
    "parameter_importances",
    "profile_of_evolve",
    "recipe_key",
    "score_hand_written",
    "score_once",
    "search",
    "serve_dashboard",
    "study_key",
]

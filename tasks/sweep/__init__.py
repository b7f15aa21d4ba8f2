"""A sweep: the free parameters of a recipe are searched, and the best candidate is confirmed on documents that no trial
saw, or nothing is.
"""

from tasks.sweep.batch import ScoreAll, score_once
from tasks.sweep.confirmation import Confirmation, Unconfirmed, confirm, nothing_to_confirm
from tasks.sweep.confirmation_power import ConfirmationPower, confirmation_power
from tasks.sweep.evidence import SweepEvidence, pin_sweep, trial_sets
from tasks.sweep.evolve import Converted, NotCarried, profile_of_evolve
from tasks.sweep.ledger import Ledger, open_ledger, study_key
from tasks.sweep.objective import HAND_WRITTEN, Objective, Term, objective_of
from tasks.sweep.optuna_view import Importances, StudyView, open_view, parameter_importances, serve_dashboard
from tasks.sweep.racing import Race, doubling_looks, shares_after_looks
from tasks.sweep.recipes import base_of, layers_of, named_by, recipe_text, relocated
from tasks.sweep.search import hand_written_recipes, score_hand_written, search
from tasks.sweep.settings import SweepSettings
from tasks.sweep.space import Coordinate, Space, at_start, make_space, recipe_key
from tasks.sweep.study import HandWritten, SearchProgress, Study
from tasks.sweep.trial import TrialSet, TrialSetting, score_model, score_trial
from tasks.sweep.trials import TEXT, Asked, Sheet, Trial, TrialRequest, TrialScores
from tasks.sweep.workshop import PreparedSearch, Workshop

__all__ = [
    "HAND_WRITTEN",
    "TEXT",
    "Asked",
    "Confirmation",
    "ConfirmationPower",
    "Converted",
    "Coordinate",
    "HandWritten",
    "Importances",
    "Ledger",
    "NotCarried",
    "Objective",
    "PreparedSearch",
    "Race",
    "ScoreAll",
    "SearchProgress",
    "Sheet",
    "Space",
    "Study",
    "StudyView",
    "SweepEvidence",
    "SweepSettings",
    "Term",
    "Trial",
    "TrialRequest",
    "TrialScores",
    "TrialSet",
    "TrialSetting",
    "Unconfirmed",
    "Workshop",
    "at_start",
    "base_of",
    "confirm",
    "confirmation_power",
    "doubling_looks",
    "hand_written_recipes",
    "layers_of",
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
    "score_hand_written",
    "score_model",
    "score_once",
    "score_trial",
    "search",
    "serve_dashboard",
    "shares_after_looks",
    "study_key",
    "trial_sets",
]

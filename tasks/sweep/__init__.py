"""A sweep: the free parameters of a recipe are searched, and the best candidate is confirmed on documents that no trial
saw, or nothing is.
"""

from tasks.sweep.confirmation import Confirmation, Unconfirmed
from tasks.sweep.confirmation_power import ConfirmationPower
from tasks.sweep.evidence import SweepEvidence, pin_sweep
from tasks.sweep.objective import Term
from tasks.sweep.racing import doubling_looks
from tasks.sweep.settings import SweepSettings
from tasks.sweep.space import at_start
from tasks.sweep.study import Study
from tasks.sweep.trials import TEXT, Asked, Sheet, Trial, TrialScores

__all__ = [
    "TEXT",
    "Asked",
    "Confirmation",
    "ConfirmationPower",
    "Sheet",
    "Study",
    "SweepEvidence",
    "SweepSettings",
    "Term",
    "Trial",
    "TrialScores",
    "Unconfirmed",
    "at_start",
    "doubling_looks",
    "pin_sweep",
]

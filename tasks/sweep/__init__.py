"""A sweep: the free parameters of a recipe are searched, and the best candidate is confirmed on documents that no trial
saw, or nothing is.
"""

from tasks.sweep.settings import SweepSettings
from tasks.sweep.trials import Asked, Sheet, Trial, TrialScores

__all__ = ["Asked", "Sheet", "SweepSettings", "Trial", "TrialScores"]

"""A sweep: the free parameters of a recipe are searched, and the best candidate is confirmed on documents that no trial
saw, or nothing is.
"""

from tasks.sweep.evidence import SweepEvidence, pin_sweep
from tasks.sweep.settings import SweepSettings
from tasks.sweep.space import at_start
from tasks.sweep.trials import Asked, Sheet, Trial, TrialScores

__all__ = ["Asked", "Sheet", "SweepEvidence", "SweepSettings", "Trial", "TrialScores", "at_start", "pin_sweep"]

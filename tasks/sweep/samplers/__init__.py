"""Samplers that propose the next generation of candidates: CMA-ES, random search, and samplers of Optuna."""

from mergegate.tasks.sweep.samplers.choice import generation_size, make_baseline, make_sampler
from mergegate.tasks.sweep.samplers.contract import Sampler, TrialResult
from mergegate.tasks.sweep.samplers.optional_packages import installed, quiet_optuna
from mergegate.tasks.sweep.samplers.random_search import RandomSearch

__all__ = [
    "RandomSearch",
    "Sampler",
    "TrialResult",
    "generation_size",
    "installed",
    "make_baseline",
    "make_sampler",
    "quiet_optuna",
]

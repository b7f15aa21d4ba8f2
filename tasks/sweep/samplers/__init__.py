"""Where the next generation of candidates comes from: CMA-ES, random search, and samplers of Optuna; one contract."""

from mergegate.tasks.sweep.samplers.choice import generation_size, make_baseline, make_sampler
from mergegate.tasks.sweep.samplers.contract import Sampler, Told
from mergegate.tasks.sweep.samplers.extras import hushed, installed
from mergegate.tasks.sweep.samplers.uniform import RandomSearch

__all__ = ["RandomSearch", "Sampler", "Told", "generation_size", "hushed", "installed", "make_baseline", "make_sampler"]

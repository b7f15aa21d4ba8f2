"""Search with samplers of Optuna in memory: TPE, Gaussian processes and NSGA-II.

Optuna draws a new seed when it resumes a study. Here, the study always starts empty and receives all results again, so
it proposes the same points again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mergegate.tasks.sweep.objective import Objective
from mergegate.tasks.sweep.samplers.contract import TrialResult
from mergegate.tasks.sweep.samplers.optional_packages import installed, quiet_optuna
from mergegate.tasks.sweep.space import Space
from mergegate.tasks.sweep.trials import Point

_CONSTRAINTS = "constraints"


class OptunaSearch:
    """In-memory Optuna study whose parameters are positions in [0, 1] or indices of choices.

    Args:
        kind: ``tpe``, ``gp`` or ``nsga2``.
        size: Number of points in a generation.

    Raises:
        InvalidInput: Optuna is not installed.
    """

    def __init__(self, space: Space, objective: Objective, kind: str, seed: int, size: int) -> None:
        self._optuna = installed("optuna")
        self._space, self._size = space, size
        self._objectives = len(objective.terms) if objective.several else 1
        self._worst: list[float] = []
        self._asked: list[Any] = []
        samplers = self._optuna.samplers
        with quiet_optuna(self._optuna):
            sampler = {
                "tpe": lambda: samplers.TPESampler(seed=seed, constant_liar=True, multivariate=True),
                "gp": lambda: samplers.GPSampler(seed=seed, deterministic_objective=False),
                "nsga2": lambda: samplers.NSGAIISampler(seed=seed, population_size=size),
            }[kind]()
            self._study = self._optuna.create_study(
                storage=self._optuna.storages.InMemoryStorage(),
                sampler=sampler,
                directions=["maximize"] * self._objectives,
            )
        self._distributions = {
            coordinate.name: self._distribution(coordinate.choices, coordinate.free.type)
            for coordinate in space.coordinates
        }

    def begin(self, start: TrialResult) -> None:
        """Add the hand-written values to the study as a trial that the sampler did not propose."""
        if any(math.isnan(score) for score in start.scores):
            return
        unit = dict(zip(self._distributions, self._space.encode(start.point), strict=True))
        self._study.enqueue_trial({name: self._optuna_value(name, float(position)) for name, position in unit.items()})
        with quiet_optuna(self._optuna):
            self._record(self._study.ask(self._distributions), start)

    def ask(self) -> list[Point]:
        """Return the next ``size`` points."""
        with quiet_optuna(self._optuna):
            self._asked = [self._study.ask(self._distributions) for _ in range(self._size)]
        return [
            self._space.decode([self._unit(name, trial.params[name]) for name in self._distributions])
            for trial in self._asked
        ]

    def tell(self, scored: Sequence[TrialResult]) -> None:
        """Add the results of a generation to the study, in the order of its points."""
        with quiet_optuna(self._optuna):
            for trial, result in zip(self._asked, scored, strict=True):
                self._record(trial, result)

    def _record(self, trial: Any, result: TrialResult) -> None:
        scores = list(result.scores)
        if not scores or any(math.isnan(score) for score in scores):
            # A trial reported as failed would leave its generation one short, and the sampler would not learn to avoid
            # the point. It gets the worst score so far instead.
            scores = self._worst or [0.0] * self._objectives
        else:
            self._worst = [min(pair) for pair in zip(scores, self._worst or scores, strict=True)]
        trial.set_constraint(_CONSTRAINTS, result.violation if not math.isnan(result.violation) else 1.0)
        self._study.tell(trial, scores)

    def _distribution(self, choices: int, kind: str) -> Any:
        distributions = self._optuna.distributions
        if not choices:
            return distributions.FloatDistribution(0.0, 1.0)
        if kind == "category":
            return distributions.CategoricalDistribution(list(range(choices)))
        return distributions.IntDistribution(0, choices - 1)

    def _unit(self, name: str, value: float) -> float:
        choices = self._choices(name)
        return (value + 0.5) / choices if choices else value

    def _optuna_value(self, name: str, unit: float) -> float | int:
        choices = self._choices(name)
        return min(int(unit * choices), choices - 1) if choices else float(np.clip(unit, 0.0, 1.0))

    def _choices(self, name: str) -> int:
        return next(coordinate.choices for coordinate in self._space.coordinates if coordinate.name == name)

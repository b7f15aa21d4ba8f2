"""Samplers of Optuna, asked and told in memory: TPE, Gaussian processes, NSGA-II.

Optuna's own way to resume draws a new seed. Here the study begins empty each time and is told everything again, so the
same is asked again.
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
    """A study of Optuna in memory. Coordinates are positions in [0, 1], or numbers of choices.

    Args:
        kind: ``tpe``, ``gp`` or ``nsga2``.
        size: Points of a generation.

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
        self._distributions = {one.name: self._distribution(one.choices, one.free.type) for one in space.coordinates}

    def begin(self, start: TrialResult) -> None:
        """The hand-written values are a trial of the study; it is asked for by nobody."""
        if any(math.isnan(score) for score in start.scores):
            return
        unit = dict(zip(self._distributions, self._space.encode(start.point), strict=True))
        self._study.enqueue_trial({name: self._as_asked(name, float(at)) for name, at in unit.items()})
        with quiet_optuna(self._optuna):
            self._told(self._study.ask(self._distributions), start)

    def ask(self) -> list[Point]:
        """``size`` points."""
        with quiet_optuna(self._optuna):
            self._asked = [self._study.ask(self._distributions) for _ in range(self._size)]
        return [
            self._space.decode([self._unit(name, one.params[name]) for name in self._distributions])
            for one in self._asked
        ]

    def tell(self, scored: Sequence[TrialResult]) -> None:
        """In the order in which they were asked."""
        with quiet_optuna(self._optuna):
            for trial, told in zip(self._asked, scored, strict=True):
                self._told(trial, told)

    def _told(self, trial: Any, told: TrialResult) -> None:
        scores = list(told.scores)
        if not scores or any(math.isnan(score) for score in scores):
            # Were it told as failed, its generation would stay short of one, and nobody would learn to keep away.
            scores = self._worst or [0.0] * self._objectives
        else:
            self._worst = [min(pair) for pair in zip(scores, self._worst or scores, strict=True)]
        trial.set_constraint(_CONSTRAINTS, told.violation if not math.isnan(told.violation) else 1.0)
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

    def _as_asked(self, name: str, unit: float) -> float | int:
        choices = self._choices(name)
        return min(int(unit * choices), choices - 1) if choices else float(np.clip(unit, 0.0, 1.0))

    def _choices(self, name: str) -> int:
        return next(one.choices for one in self._space.coordinates if one.name == name)

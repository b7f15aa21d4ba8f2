"""Propose the next generation of candidates: CMA-ES, random search, and samplers of Optuna.

A sampler is deterministic: with the same seed, and the same scores in the same order, it proposes the same points. Its
state is never stored. A killed search repeats its proposals and takes their scores from the ledger.

CMA-ES (from the package ``cmaes``) samples from a normal distribution that starts around the hand-written values and
moves toward better ones (Hansen 2016, arXiv 1604.00772). With integers or categories, CatCMA with margin is used
(Hamano et al. 2025, arXiv 2504.07884). Both receive ranks by Deb's rule instead of scores, so that constraints count
and the unit of the scores does not. After convergence, the search restarts at a random point with twice the population
(IPOP: Auger & Hansen 2005).

Optuna's samplers are TPE, Gaussian processes and NSGA-II. Optuna draws a new seed when it resumes a stored study, so
its study is in memory and receives all results again after a restart.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.tasks.sweep.objective import Objective
from mergegate.tasks.sweep.settings import Point, SweepSettings
from mergegate.tasks.sweep.space import Space
from mergegate.tasks.sweep.study import rank

_RESAMPLED = 10  # redraws per coordinate before a point outside the range is clipped to it
_AT_START = 0.5  # probability of the hand-written choice in the first generation of CMA-ES
_CONSTRAINTS = "constraints"


class TrialResult(NamedTuple):
    """Point of the search space, with the scores of its candidate."""

    point: Point
    scores: tuple[float, ...]  # One number per objective; more is better. NaN counts as worst.
    violation: float = 0.0  # Sum of all constraint violations.


class Sampler(Protocol):
    """Source of the next generation of candidates."""

    def begin(self, start: TrialResult) -> None:
        """Receive the result of the hand-written values. Called once, before the first generation."""

    def ask(self) -> list[Point]:
        """Return the next generation. Call :meth:`tell` with all of its results before asking for another one."""

    def tell(self, trial_results: Sequence[TrialResult]) -> None:
        """Receive the results of a generation, in the order of its points."""


def generation_size(dimensions: int, settings: SweepSettings) -> int:
    """Return the number of candidates in a generation.

    This is ``settings.population`` if set, else ``4 + 3 ln n`` for ``n`` dimensions (Hansen 2016), at least 6.
    """
    return settings.population or max(6, 4 + int(3 * math.log(max(1, dimensions))))


def make_sampler(space: Space, objective: Objective, settings: SweepSettings) -> Sampler:
    """Create the sampler of a sweep.

    Raises:
        InvalidInput: The package of the sampler is not installed, or the sampler does not support the objective.
    """
    size = generation_size(len(space.coordinates), settings)
    if settings.sampler == "random":
        return RandomSearch(space, settings.seed, size)
    if settings.sampler == "cma":
        if objective.multi_objective:
            raise InvalidInput(
                "sweep.sampler",
                found="cma, which supports only one objective",
                expected="a sampler that finds a Pareto front",
                remedy="set sampler: nsga2, or multi_objective: false to search for the weighted sum",
            )
        return EvolutionStrategy(space, objective, settings.seed, settings.sigma, size)
    return OptunaSearch(space, objective, settings.sampler, settings.seed, size)


class RandomSearch:
    """Sampler of uniform draws that do not depend on earlier results. It is the baseline in reports.

    Args:
        size: Number of points in a generation.
    """

    def __init__(self, space: Space, seed: int, size: int) -> None:
        self._space, self._size = space, size
        self._rng = np.random.default_rng(seed)

    def begin(self, start: TrialResult) -> None:
        """Ignore the result, because draws do not depend on it."""

    def ask(self) -> list[Point]:
        """Return the next ``size`` points."""
        return self.draw(self._size)

    def draw(self, count: int) -> list[Point]:
        """Return the next ``count`` points, which do not depend on the size of earlier calls."""
        return [self._space.decode(self._rng.random(len(self._space.coordinates))) for _ in range(count)]

    def tell(self, trial_results: Sequence[TrialResult]) -> None:
        """Ignore the results, because draws do not depend on them."""


class EvolutionStrategy:
    """CMA-ES sampler over the unit cube (see the module).

    Args:
        sigma: Initial step size, as a share of each range.
        size: Number of points in a generation.

    Raises:
        InvalidInput: The package ``cmaes`` is not installed.
    """

    def __init__(self, space: Space, objective: Objective, seed: int, sigma: float, size: int) -> None:
        self._cmaes = import_optional("cmaes")
        self._space, self._objective, self._sigma, self._size = space, objective, sigma, size
        self._rng = np.random.default_rng(seed)
        choices = [coordinate.choices for coordinate in space.coordinates]
        # An integer with two values is treated as a category, because there is no value between them.
        self._floats = [i for i, count in enumerate(choices) if not count]
        self._integers = [i for i, n in enumerate(choices) if n > 2 and space.coordinates[i].free.type == "integer"]
        self._categories = [i for i, n in enumerate(choices) if n > 1 and i not in self._integers]
        self._pending: list[Any] = []
        self._strategy = self._new_strategy(space.encode(space.start))

    def begin(self, start: TrialResult) -> None:
        """Ignore the result, because the first generation is drawn around the hand-written values anyway."""

    def ask(self) -> list[Point]:
        """Return the next generation of points."""
        self._pending = [self._strategy.ask() for _ in range(self._strategy.population_size)]
        return [self._space.decode(self._position(draw)) for draw in self._pending]

    def tell(self, trial_results: Sequence[TrialResult]) -> None:
        """Update the distribution with the results, and restart it if it has converged."""
        ranks = rank(
            [result.scores for result in trial_results], [result.violation for result in trial_results], self._objective
        )
        self._strategy.tell([(draw, float(position)) for draw, position in zip(self._pending, ranks, strict=True)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # With categories only, cmaes warns that it has no stopping rule.
            has_converged = self._strategy.should_stop()
        if has_converged:
            self._size *= 2
            self._strategy = self._new_strategy(self._rng.random(len(self._space.coordinates)))

    def _new_strategy(self, mean: NDArray[np.float64]) -> Any:
        seed = int(self._rng.integers(2**31))
        if not self._integers and not self._categories:
            return self._cmaes.CMA(
                mean=mean.copy(),
                sigma=self._sigma,
                bounds=np.tile([0.0, 1.0], (len(mean), 1)),
                seed=seed,
                population_size=self._size,
                n_max_resampling=_RESAMPLED * len(mean),
            )
        counts = {i: self._space.coordinates[i].choices for i in (*self._integers, *self._categories)}
        middle = np.array([*mean[self._floats], *(mean[i] * counts[i] - 0.5 for i in self._integers)])
        width = np.array([1.0] * len(self._floats) + [counts[i] - 1.0 for i in self._integers])
        gaussian = {"mean": middle, "sigma": self._sigma, "cov": np.diag(width**2)} if len(middle) else {}
        # Probability of each choice, [categories, largest number of choices].
        chances = np.zeros((len(self._categories), max([counts[i] for i in self._categories], default=0)))
        for row, i in enumerate(self._categories):
            chances[row, : counts[i]] = (1 - _AT_START) / (counts[i] - 1)
            chances[row, min(int(mean[i] * counts[i]), counts[i] - 1)] = _AT_START
        return self._cmaes.CatCMAwM(
            x_space=[[0.0, 1.0]] * len(self._floats) or None,
            z_space=[list(range(counts[i])) for i in self._integers] or None,
            c_space=[counts[i] for i in self._categories] or None,
            cat_param=chances if self._categories else None,
            population_size=self._size,
            seed=seed,
            **gaussian,
        )

    def _position(self, draw: Any) -> NDArray[np.float64]:
        """Return the position of a draw in the unit cube, ``[coordinates]``."""
        if isinstance(draw, np.ndarray):
            return draw
        unit = np.full(len(self._space.coordinates), 0.5)
        if self._floats:
            unit[self._floats] = draw.x
        for i, value in zip(self._integers, draw.z if self._integers else (), strict=True):
            unit[i] = (value + 0.5) / self._space.coordinates[i].choices
        for i, one_hot in zip(self._categories, draw.c if self._categories else (), strict=True):
            unit[i] = (int(np.argmax(one_hot)) + 0.5) / self._space.coordinates[i].choices
        return unit


class OptunaSearch:
    """Sampler of Optuna, in a study whose parameters are positions in [0, 1] or indices of choices.

    Args:
        kind: ``tpe``, ``gp`` or ``nsga2``.
        size: Number of points in a generation.

    Raises:
        InvalidInput: Optuna is not installed.
    """

    def __init__(self, space: Space, objective: Objective, kind: str, seed: int, size: int) -> None:
        self._optuna = import_optional("optuna")
        self._space, self._size = space, size
        self._worst = [0.0] * (len(objective.terms) if objective.multi_objective else 1)
        self._has_score = False
        self._pending: list[Any] = []
        samplers, distributions = self._optuna.samplers, self._optuna.distributions
        with quiet_optuna(self._optuna):
            sampler = {
                "tpe": lambda: samplers.TPESampler(seed=seed, constant_liar=True, multivariate=True),
                "gp": lambda: samplers.GPSampler(seed=seed, deterministic_objective=False),
                "nsga2": lambda: samplers.NSGAIISampler(seed=seed, population_size=size),
            }[kind]()
            self._study = self._optuna.create_study(
                storage=self._optuna.storages.InMemoryStorage(),
                sampler=sampler,
                directions=["maximize"] * len(self._worst),
            )
        self._distributions: dict[str, Any] = {}
        for coordinate in space.coordinates:
            last = coordinate.choices - 1
            if last < 0:
                distribution = distributions.FloatDistribution(0.0, 1.0)
            elif coordinate.free.type == "category":
                distribution = distributions.CategoricalDistribution(list(range(last + 1)))
            else:
                distribution = distributions.IntDistribution(0, last)
            self._distributions[coordinate.name] = distribution

    def begin(self, start: TrialResult) -> None:
        """Add the hand-written values to the study as a trial that the sampler did not propose."""
        if any(math.isnan(score) for score in start.scores):
            return
        values: dict[str, float] = {}
        for coordinate, unit in zip(self._space.coordinates, map(float, self._space.encode(start.point)), strict=True):
            count = coordinate.choices
            values[coordinate.name] = min(int(unit * count), count - 1) if count else float(np.clip(unit, 0.0, 1.0))
        self._study.enqueue_trial(values)
        with quiet_optuna(self._optuna):
            self._record(self._study.ask(self._distributions), start)

    def ask(self) -> list[Point]:
        """Return the next ``size`` points."""
        with quiet_optuna(self._optuna):
            self._pending = [self._study.ask(self._distributions) for _ in range(self._size)]
        points = []
        for trial in self._pending:
            values = ((trial.params[coordinate.name], coordinate.choices) for coordinate in self._space.coordinates)
            points.append(self._space.decode([(value + 0.5) / count if count else value for value, count in values]))
        return points

    def tell(self, trial_results: Sequence[TrialResult]) -> None:
        """Add the results of a generation to the study, in the order of its points."""
        with quiet_optuna(self._optuna):
            for trial, result in zip(self._pending, trial_results, strict=True):
                self._record(trial, result)

    def _record(self, trial: Any, result: TrialResult) -> None:
        scores = list(result.scores)
        if not scores or any(math.isnan(score) for score in scores):
            # A trial reported as failed would leave its generation one short, and the sampler would not learn to avoid
            # the point. It gets the worst score so far instead.
            scores = self._worst
        else:
            self._worst = [min(pair) for pair in zip(scores, self._worst, strict=True)] if self._has_score else scores
            self._has_score = True
        trial.set_constraint(_CONSTRAINTS, result.violation if not math.isnan(result.violation) else 1.0)
        self._study.tell(trial, scores)


def import_optional(package: str, extra: str = "sweep") -> Any:
    """Import and return ``package``, which the extra ``extra`` installs.

    Raises:
        InvalidInput: The package is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise InvalidInput(
            "sweep",
            found=f"the package {error.name} is not installed",
            expected=f"the packages of the extra '{extra}'",
            remedy=pip_command(f"mergegate[{extra}]"),
        ) from None


@contextmanager
def quiet_optuna(optuna: Any) -> Iterator[None]:
    """Suppress Optuna's log lines and warnings inside the block."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)

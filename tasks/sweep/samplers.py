"""Propose the next generation of candidates (CMA-ES, random search, samplers of Optuna), and export trials to Optuna.

A sampler is deterministic: with the same seed, and the same scores in the same order, it proposes the same points. Its
state is never stored. A killed search repeats its proposals and takes their scores from the ledger.

CMA-ES (from the package ``cmaes``) samples from a normal distribution that starts around the hand-written values and
moves toward better ones (Hansen 2016, arXiv 1604.00772). With integers or categories, CatCMA with margin is used
(Hamano et al. 2025, arXiv 2504.07884). Both receive ranks by Deb's rule instead of scores, so that constraints count
and the unit of the scores does not. After convergence, the search restarts at a random point with twice the population
(IPOP: Auger & Hansen 2005).

Optuna's samplers are TPE, Gaussian processes and NSGA-II. Optuna draws a new seed when it resumes a stored study, so
its study is in memory and receives all results again after a restart.

:func:`open_view` exports the trials to a storage of Optuna, for its dashboard: a journal file (on one machine or a
shared file system) or a database. The search never reads the export, which can be rebuilt from the ledger. Parameter
importances are a rough guide: with sixty trials, many of them close together, they vary from search to search.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput, MergegateError, pip_command
from mergegate.merge_core.files import disk_errors_refused
from mergegate.tasks.sweep.objective import Objective
from mergegate.tasks.sweep.settings import Point, SweepSettings, Value
from mergegate.tasks.sweep.space import Coordinate, Space
from mergegate.tasks.sweep.study import Study, Trial, rank

_RESAMPLED = 10  # redraws per coordinate before a point outside the range is clipped to it
_AT_START = 0.5  # probability of the hand-written choice in the first generation of CMA-ES
_CONSTRAINTS = "constraints"
_MIN_TRIALS = 10  # smallest number of trials to compute importances from


class Sampler:
    """Source of the next generation of candidates."""

    def begin(self, start: Trial) -> None:
        """Receive the trial of the hand-written values. Called once, before the first generation."""

    def ask(self) -> list[Point]:
        """Return the next generation. Call :meth:`tell` with all of its trials before asking for another one."""
        raise NotImplementedError

    def tell(self, trials: Sequence[Trial]) -> None:
        """Receive the trials of a generation, in the order of its points."""


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


class RandomSearch(Sampler):
    """Sampler of uniform draws, ``size`` in a generation. It is the baseline in reports."""

    def __init__(self, space: Space, seed: int, size: int) -> None:
        self._space, self._size = space, size
        self._rng = np.random.default_rng(seed)

    def ask(self) -> list[Point]:
        return self.draw(self._size)

    def draw(self, count: int) -> list[Point]:
        """Return the next ``count`` points, which do not depend on the size of earlier calls."""
        return [self._space.decode(self._rng.random(len(self._space.coordinates))) for _ in range(count)]


class EvolutionStrategy(Sampler):
    """CMA-ES sampler over the unit cube (see the module). ``sigma`` is the first step, as a share of each range."""

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

    def ask(self) -> list[Point]:
        self._pending = [self._strategy.ask() for _ in range(self._strategy.population_size)]
        return [self._space.decode(self._position(draw)) for draw in self._pending]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Update the distribution with the results, and restart it if it has converged."""
        ranks = rank([trial.scores for trial in trials], [trial.violation for trial in trials], self._objective)
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


class OptunaSearch(Sampler):
    """Sampler of Optuna (``tpe``, ``gp`` or ``nsga2``), in a study of positions in [0, 1] and indices of choices."""

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

    def begin(self, start: Trial) -> None:
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
        with quiet_optuna(self._optuna):
            self._pending = [self._study.ask(self._distributions) for _ in range(self._size)]
        points = []
        for trial in self._pending:
            values = ((trial.params[coordinate.name], coordinate.choices) for coordinate in self._space.coordinates)
            points.append(self._space.decode([(value + 0.5) / count if count else value for value, count in values]))
        return points

    def tell(self, trials: Sequence[Trial]) -> None:
        with quiet_optuna(self._optuna):
            for pending, trial in zip(self._pending, trials, strict=True):
                self._record(pending, trial)

    def _record(self, pending: Any, trial: Trial) -> None:
        scores = list(trial.scores)
        if not scores or any(math.isnan(score) for score in scores):
            # A trial reported as failed would leave its generation one short, and the sampler would not learn to avoid
            # the point. It gets the worst score so far instead.
            scores = self._worst
        else:
            self._worst = [min(pair) for pair in zip(scores, self._worst, strict=True)] if self._has_score else scores
            self._has_score = True
        pending.set_constraint(_CONSTRAINTS, trial.violation if not math.isnan(trial.violation) else 1.0)
        self._study.tell(pending, scores)


def import_optional(package: str, extra: str = "sweep") -> Any:
    """Import and return ``package``. Raise InvalidInput if it is missing: the extra ``extra`` installs it."""
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


def open_view(
    address: str, name: str, coordinates: Sequence[Coordinate], objective: Objective
) -> Callable[[Sequence[Trial]], int]:
    """Open the Optuna study of a search, and return a function that exports trials to it.

    The function adds the trials that the study does not have yet, and returns their number.

    Args:
        address: Path of a journal file, or the address of a database (``postgresql://…``).
        name: Name of the study, which must be different for each search. It is created if it does not exist.
        coordinates: Coordinates of the search space.
        objective: Objective of the search.

    Raises:
        InvalidInput: Optuna is not installed, the database cannot be reached, or a study of that name has another
            number of objectives.
        DiskUnavailable: The file cannot be written.
    """
    optuna = import_optional("optuna")
    objectives = len(objective.terms) if objective.multi_objective else 1
    with quiet_optuna(optuna):
        storage = view_storage(address)
        study = _connect(
            address,
            lambda: optuna.create_study(
                storage=storage,
                study_name=name,
                directions=["maximize"] * objectives,
                sampler=optuna.samplers.RandomSampler(seed=0),
                load_if_exists=True,
            ),
        )
        if len(study.directions) != objectives:
            raise InvalidInput(
                f"sweep: study {name}",
                found=f"a stored study with {len(study.directions)} objectives",
                expected=f"{objectives}",
                remedy="use a different name or file",
            )
    return partial(_export, study, coordinates, objective)


def _export(study: Any, coordinates: Sequence[Coordinate], objective: Objective, trials: Sequence[Trial]) -> int:
    """Add the trials that an Optuna study does not have yet, and return their number.

    Hand-written recipes other than the searched one are skipped, because they are not points of the space.
    """
    optuna = import_optional("optuna")
    with quiet_optuna(optuna):
        recorded = {item.user_attrs.get("number") for item in study.get_trials(deepcopy=False)}
        new = [trial for trial in trials if trial.number not in recorded and trial.point]
        study.add_trials([_optuna_trial(optuna, trial, coordinates, objective) for trial in new])
    return len(new)


def _optuna_trial(optuna: Any, trial: Trial, coordinates: Sequence[Coordinate], objective: Objective) -> Any:
    failed = bool(trial.problem) or any(math.isnan(score) for score in trial.scores)
    values: dict[str, Value] = {}
    distributions, kinds = {}, optuna.distributions
    for coordinate in coordinates:
        name, free, value = coordinate.name, coordinate.free, trial.point[coordinate.name]
        if free.type == "category":
            # Use the object in ``choices``. A value from a file may be equal to it but of another type.
            values[name] = free.choices[int(coordinate.encode(value) * coordinate.choices)]
            distributions[name] = kinds.CategoricalDistribution(free.choices)
        elif free.type == "integer":
            values[name] = int(value)
            distributions[name] = kinds.IntDistribution(int(coordinate.low), int(coordinate.high))
        else:
            values[name] = float(value)
            distributions[name] = kinds.FloatDistribution(coordinate.low, coordinate.high, log=free.type == "log")
    names = ("number", "generation", "origin", "documents", "dropped", "seconds")
    attributes = {name: getattr(trial, name) for name in names}
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE,
        values=None if failed else list(trial.scores),
        params=values,
        distributions=distributions,
        user_attrs={**attributes, **({"problem": trial.problem} if trial.problem else {})},
        constraints={_CONSTRAINTS: trial.violation} if objective.limits and not failed else None,
    )


def view_storage(address: str) -> Any:
    """Return an Optuna storage for the path of a journal file or the address of a database."""
    optuna = import_optional("optuna")
    if "://" in address:
        return _connect(address, lambda: optuna.storages.RDBStorage(address))
    file = Path(address)
    with disk_errors_refused(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))


def parameter_importances(study: Study) -> tuple[Mapping[str, float], str]:
    """Return how much of the variation in the score each coordinate explains, and why there is nothing if so.

    The importances are from 0 to 1, by name of coordinate, largest first.

    Raises:
        InvalidInput: Optuna is not installed.
    """
    trials = [trial for trial in study.trials if trial.point and not trial.problem]
    if len(trials) < _MIN_TRIALS:
        return {}, f"fewer than {_MIN_TRIALS} trials have a score"
    if len({trial.scores for trial in trials}) < 2:
        return {}, "all trials have the same score"
    optuna, objective = import_optional("optuna"), study.objective
    with quiet_optuna(optuna):
        directions = ["maximize"] * len(trials[0].scores)
        optuna_study = optuna.create_study(storage=optuna.storages.InMemoryStorage(), directions=directions)
        _export(optuna_study, study.coordinates, objective, trials)
        target = (lambda trial: objective.total(trial.values)) if objective.multi_objective else None
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares = optuna.importance.get_param_importances(optuna_study, evaluator=evaluator, target=target)
    return {name: float(share) for name, share in shares.items()}, ""


def serve_dashboard(address: str, port: int = 8080) -> None:
    """Serve Optuna's dashboard for the storage at ``address`` on 127.0.0.1 until interrupted."""
    dashboard = import_optional("optuna_dashboard", extra="dashboard")
    with quiet_optuna(import_optional("optuna")):
        storage = view_storage(address)
    dashboard.run_server(storage, host="127.0.0.1", port=port)


def _connect(address: str, connect: Callable[[], Any]) -> Any:
    try:
        return connect()
    except MergegateError:
        raise
    except Exception as error:  # the type depends on the database driver
        if "://" not in address:
            raise
        # Omit the address and the driver's message, because both may contain a password.
        raise InvalidInput(
            "sweep: storage",
            found=f"cannot use the database at {address.partition('://')[0]}://… ({type(error).__name__})",
            expected="an SQLAlchemy address whose driver is installed",
            remedy="use a journal file instead, which needs no database",
        ) from None

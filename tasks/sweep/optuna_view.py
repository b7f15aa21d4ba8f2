"""The study as other tools read it: every trial written into a storage of Optuna, for its dashboard and importances.

A view, never the truth: the search reads nothing of it, and it can be made again from the ledger. It is a journal file
(one machine, or a file system that is shared) or the address of a database.

Importances are indicative: of sixty trials, many of them close together, another sixty say something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.files import disk_errors_refused
from mergegate.tasks.sweep.objective import Objective
from mergegate.tasks.sweep.samplers import installed, quiet_optuna
from mergegate.tasks.sweep.settings import Value
from mergegate.tasks.sweep.space import Coordinate
from mergegate.tasks.sweep.study import Study
from mergegate.tasks.sweep.trials import Trial

Evaluator = Literal["ped_anova", "fanova"]
_CONSTRAINTS = "constraints"
_FEWEST = 10  # trials below which nothing is said


@dataclass(frozen=True)
class Importances:
    """How much each coordinate decides of the score, as shares of 1; indicative.

    Args:
        shares: By name of coordinate, largest first; empty where nothing can be said.
        method: Of Optuna.
        trials: That it is told from.
        why_none: Where nothing can be said.
    """

    shares: Mapping[str, float]
    method: str
    trials: int
    why_none: str = ""


class StudyView:
    """A study of Optuna that is written to. Made by :func:`open_view`."""

    def __init__(self, study: Any, coordinates: Sequence[Coordinate], objective: Objective) -> None:
        self._study, self._coordinates, self._objective = study, coordinates, objective
        self._optuna = installed("optuna")

    def record(self, trials: Sequence[Trial]) -> int:
        """Add those that it does not have yet; how many those were.

        Recipes that were written otherwise have no place in the space, and are left out.
        """
        with quiet_optuna(self._optuna):
            known = {one.user_attrs.get("number") for one in self._study.get_trials(deepcopy=False)}
            new = [trial for trial in trials if trial.number not in known and trial.point]
            self._study.add_trials([self._frozen(trial) for trial in new])
        return len(new)

    def _frozen(self, trial: Trial) -> Any:
        failed = bool(trial.problem) or any(math.isnan(score) for score in trial.scores)
        said = {
            "number": trial.number,
            "generation": trial.generation,
            "origin": trial.origin,
            "documents": trial.documents,
            "dropped": trial.dropped,
            "seconds": trial.seconds,
            **({"problem": trial.problem} if trial.problem else {}),
        }
        state = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(
            state=state.FAIL if failed else state.COMPLETE,
            values=None if failed else list(trial.scores),
            params={one.name: _optuna_value(one, trial.point[one.name]) for one in self._coordinates},
            distributions={one.name: self._distribution(one) for one in self._coordinates},
            user_attrs=said,
            constraints={_CONSTRAINTS: trial.violation} if self._objective.limits and not failed else None,
        )

    def _distribution(self, one: Coordinate) -> Any:
        distributions = self._optuna.distributions
        if one.free.type == "category":
            return distributions.CategoricalDistribution(one.free.among)
        if one.free.type == "integer":
            return distributions.IntDistribution(int(one.low), int(one.high))
        return distributions.FloatDistribution(one.low, one.high, log=one.free.type == "log")

    def importances(self, evaluator: Evaluator) -> Mapping[str, float]:
        """Of Optuna; of several objectives those of their weighted sum."""
        module, several = self._optuna.importance, self._objective.several
        chosen = {"ped_anova": "PedAnovaImportanceEvaluator", "fanova": "FanovaImportanceEvaluator"}[evaluator]
        made = getattr(module, chosen)(**({"seed": 0} if evaluator == "fanova" else {}))
        target = (lambda one: self._objective.total(one.values)) if several or evaluator == "fanova" else None
        with quiet_optuna(self._optuna):
            found = module.get_param_importances(self._study, evaluator=made, target=target)
        return {name: float(share) for name, share in found.items()}


def open_view(place: str, name: str, coordinates: Sequence[Coordinate], objective: Objective) -> StudyView:
    """The view of a study, made if it is not there.

    Args:
        place: A journal file, or the address of a database (``postgresql://…``).
        name: Of the study; another search has another.

    Raises:
        InvalidInput: Optuna is not installed, the database cannot be reached, or another study has that name.
        DiskRefused: The file cannot be written.
    """
    optuna = installed("optuna")
    objectives = len(objective.terms) if objective.several else 1
    with quiet_optuna(optuna):
        storage = view_storage(place)
        study = _reached(
            place,
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
                found=f"{len(study.directions)} objectives",
                expected=f"{objectives}",
                remedy="another name, or another file",
            )
    return StudyView(study, coordinates, objective)


def view_storage(place: str) -> Any:
    """A storage of Optuna: a journal file, or a database by its address."""
    optuna = installed("optuna")
    if "://" in place:
        return _reached(place, lambda: optuna.storages.RDBStorage(place))
    file = Path(place)
    with disk_errors_refused(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))


def parameter_importances(study: Study, evaluator: Evaluator = "ped_anova") -> Importances:
    """How much each coordinate decides of the score, from the trials of a search.

    Raises:
        InvalidInput: Optuna is not installed.
    """
    trials = [one for one in study.trials if one.point and not one.problem]
    if len(trials) < _FEWEST:
        return Importances({}, evaluator, len(trials), why_none=f"fewer than {_FEWEST} trials have a score")
    if len({one.scores for one in trials}) < 2:
        return Importances({}, evaluator, len(trials), why_none="all trials have the same score")
    optuna = installed("optuna")
    with quiet_optuna(optuna):
        directions = ["maximize"] * len(trials[0].scores)
        made = optuna.create_study(storage=optuna.storages.InMemoryStorage(), directions=directions)
    view = StudyView(made, study.coordinates, study.objective)
    view.record(trials)
    return Importances(view.importances(evaluator), evaluator, len(trials))


def serve_dashboard(place: str, port: int = 8080) -> None:
    """Serve Optuna's dashboard of a view on this machine, for this machine alone, until it is interrupted.

    Raises:
        InvalidInput: It is not installed.
    """
    dashboard = installed("optuna_dashboard", extra="dashboard")
    with quiet_optuna(installed("optuna")):
        storage = view_storage(place)
    dashboard.run_server(storage, host="127.0.0.1", port=port)


def _optuna_value(one: Coordinate, value: Value) -> Value:
    if one.free.type == "category":
        return next(choice for choice in one.free.among if one.encode(choice) == one.encode(value))
    return int(value) if one.free.type == "integer" else float(value)


def _reached(place: str, open_it: Any) -> Any:
    try:
        return open_it()
    except MergegateError:
        raise
    except Exception as error:  # of whatever driver the address names
        if "://" not in place:
            raise
        # The address may hold a password, and so may what the driver says of it.
        raise InvalidInput(
            "sweep: storage",
            found=f"the database at {place.partition('://')[0]}://… cannot be used ({type(error).__name__})",
            expected="an address of SQLAlchemy, with its driver installed",
            remedy="a journal file needs neither",
        ) from None

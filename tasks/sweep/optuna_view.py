"""Export every trial of a study to an Optuna storage, for its dashboard and parameter importances.

The export is only a view: the search never reads it, and it can be rebuilt from the ledger. The storage is a journal
file (for one machine or a shared file system) or the address of a database.

Importances are indicative. With sixty trials, many of them close together, another sixty give different values.
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
_FEWEST = 10  # smallest number of trials to compute importances from


@dataclass(frozen=True)
class Importances:
    """Estimated influence of each coordinate on the score.

    The importance of a coordinate is the share of the variation in the score that it explains. It is only a rough
    guide.

    Args:
        shares: Importance by coordinate name, from 0 to 1, largest first. It is empty if importances cannot be
            computed.
        method: Name of the Optuna evaluator that computes the importances.
        trials: Number of trials that the importances are computed from.
        why_none: Reason why ``shares`` is empty. It is an empty string if there are importances.
    """

    shares: Mapping[str, float]
    method: str
    trials: int
    why_none: str = ""


class StudyView:
    """Writable Optuna study. Create it with :func:`open_view`."""

    def __init__(self, study: Any, coordinates: Sequence[Coordinate], objective: Objective) -> None:
        self._study, self._coordinates, self._objective = study, coordinates, objective
        self._optuna = installed("optuna")

    def record(self, trials: Sequence[Trial]) -> int:
        """Add the trials that the study does not have yet, and return how many were added.

        Hand-written recipes other than the searched one are left out, because they are not points of the space.
        """
        with quiet_optuna(self._optuna):
            recorded = {item.user_attrs.get("number") for item in self._study.get_trials(deepcopy=False)}
            new = [trial for trial in trials if trial.number not in recorded and trial.point]
            self._study.add_trials([self._frozen(trial) for trial in new])
        return len(new)

    def _frozen(self, trial: Trial) -> Any:
        failed = bool(trial.problem) or any(math.isnan(score) for score in trial.scores)
        attributes = {
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
            params={
                coordinate.name: _optuna_value(coordinate, trial.point[coordinate.name])
                for coordinate in self._coordinates
            },
            distributions={coordinate.name: self._distribution(coordinate) for coordinate in self._coordinates},
            user_attrs=attributes,
            constraints={_CONSTRAINTS: trial.violation} if self._objective.limits and not failed else None,
        )

    def _distribution(self, coordinate: Coordinate) -> Any:
        distributions = self._optuna.distributions
        if coordinate.free.type == "category":
            return distributions.CategoricalDistribution(coordinate.free.choices)
        if coordinate.free.type == "integer":
            return distributions.IntDistribution(int(coordinate.low), int(coordinate.high))
        return distributions.FloatDistribution(coordinate.low, coordinate.high, log=coordinate.free.type == "log")

    def importances(self, evaluator: Evaluator) -> Mapping[str, float]:
        """Return Optuna's importances. With several objectives they are those of the weighted sum."""
        module, several = self._optuna.importance, self._objective.several
        class_name = {"ped_anova": "PedAnovaImportanceEvaluator", "fanova": "FanovaImportanceEvaluator"}[evaluator]
        instance = getattr(module, class_name)(**({"seed": 0} if evaluator == "fanova" else {}))
        target = (lambda trial: self._objective.total(trial.values)) if several or evaluator == "fanova" else None
        with quiet_optuna(self._optuna):
            shares = module.get_param_importances(self._study, evaluator=instance, target=target)
        return {name: float(share) for name, share in shares.items()}


def open_view(place: str, name: str, coordinates: Sequence[Coordinate], objective: Objective) -> StudyView:
    """Open the view of a study, and create it if it does not exist.

    Args:
        place: Path of a journal file, or address of a database (``postgresql://…``).
        name: Name of the study, different for each search.

    Raises:
        InvalidInput: Optuna is not installed, the database cannot be reached, or another study has that name.
        DiskUnavailable: The file cannot be written.
    """
    optuna = installed("optuna")
    objectives = len(objective.terms) if objective.several else 1
    with quiet_optuna(optuna):
        storage = view_storage(place)
        study = _connect(
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
    """Return an Optuna storage for a journal file or the address of a database."""
    optuna = installed("optuna")
    if "://" in place:
        return _connect(place, lambda: optuna.storages.RDBStorage(place))
    file = Path(place)
    with disk_errors_refused(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))


def parameter_importances(study: Study, evaluator: Evaluator = "ped_anova") -> Importances:
    """Return how much each coordinate contributes to the score, computed from the trials of a search.

    Raises:
        InvalidInput: Optuna is not installed.
    """
    trials = [trial for trial in study.trials if trial.point and not trial.problem]
    if len(trials) < _FEWEST:
        return Importances({}, evaluator, len(trials), why_none=f"fewer than {_FEWEST} trials have a score")
    if len({trial.scores for trial in trials}) < 2:
        return Importances({}, evaluator, len(trials), why_none="all trials have the same score")
    optuna = installed("optuna")
    with quiet_optuna(optuna):
        directions = ["maximize"] * len(trials[0].scores)
        optuna_study = optuna.create_study(storage=optuna.storages.InMemoryStorage(), directions=directions)
    view = StudyView(optuna_study, study.coordinates, study.objective)
    view.record(trials)
    return Importances(view.importances(evaluator), evaluator, len(trials))


def serve_dashboard(place: str, port: int = 8080) -> None:
    """Serve Optuna's dashboard of a view on 127.0.0.1 until interrupted.

    Raises:
        InvalidInput: optuna-dashboard is not installed.
    """
    dashboard = installed("optuna_dashboard", extra="dashboard")
    with quiet_optuna(installed("optuna")):
        storage = view_storage(place)
    dashboard.run_server(storage, host="127.0.0.1", port=port)


def _optuna_value(coordinate: Coordinate, value: Value) -> Value:
    if coordinate.free.type == "category":
        return next(
            choice for choice in coordinate.free.choices if coordinate.encode(choice) == coordinate.encode(value)
        )
    return int(value) if coordinate.free.type == "integer" else float(value)


def _connect(address: str, connect: Any) -> Any:
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
            found=f"the database at {address.partition('://')[0]}://… cannot be used ({type(error).__name__})",
            expected="an address of SQLAlchemy, with its driver installed",
            remedy="a journal file needs neither",
        ) from None

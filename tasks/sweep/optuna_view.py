"""Export every trial of a study to an Optuna storage, for its dashboard and parameter importances.

The search never reads the export, which can be rebuilt from the ledger. The storage is a journal file (on one machine
or a shared file system) or a database.

Importances are a rough guide: with sixty trials, many of them close together, they vary from search to search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.files import disk_errors_refused
from mergegate.tasks.sweep.objective import Objective
from mergegate.tasks.sweep.samplers import import_optional, quiet_optuna
from mergegate.tasks.sweep.space import Coordinate
from mergegate.tasks.sweep.study import Study, Trial

Evaluator = Literal["ped_anova", "fanova"]
_CONSTRAINTS = "constraints"
_MIN_TRIALS = 10  # smallest number of trials to compute importances from


@dataclass(frozen=True)
class Importances:
    """Importance of each coordinate: the share of the variation in the score that it explains."""

    shares: Mapping[str, float]  # Importance from 0 to 1 by name of coordinate, largest first; may be empty.
    method: str  # Optuna's evaluator.
    trials: int  # Number of trials from which the importances are computed.
    reason: str = ""  # Why ``shares`` is empty.


class StudyView:
    """Optuna study to which trials are exported. Create it with :func:`open_view`."""

    def __init__(self, study: Any, coordinates: Sequence[Coordinate], objective: Objective) -> None:
        self._study, self._coordinates, self._objective = study, coordinates, objective
        self._optuna = import_optional("optuna")

    def record(self, trials: Sequence[Trial]) -> int:
        """Add the trials that the study does not have yet, and return their number.

        Hand-written recipes other than the searched one are skipped, because they are not points of the space.
        """
        with quiet_optuna(self._optuna):
            recorded = {item.user_attrs.get("number") for item in self._study.get_trials(deepcopy=False)}
            new = [trial for trial in trials if trial.number not in recorded and trial.point]
            added = []
            for trial in new:
                failed = bool(trial.problem) or any(math.isnan(score) for score in trial.scores)
                values, kinds, distributions = {}, self._optuna.distributions, {}
                for coordinate in self._coordinates:
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
                        distributions[name] = kinds.FloatDistribution(
                            coordinate.low, coordinate.high, log=free.type == "log"
                        )
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
                frozen = self._optuna.trial.create_trial(
                    state=state.FAIL if failed else state.COMPLETE,
                    values=None if failed else list(trial.scores),
                    params=values,
                    distributions=distributions,
                    user_attrs=attributes,
                    constraints={_CONSTRAINTS: trial.violation} if self._objective.limits and not failed else None,
                )
                added.append(frozen)
            self._study.add_trials(added)
        return len(new)

    def importances(self, evaluator: Evaluator) -> Mapping[str, float]:
        """Return the importance of each coordinate for the score, or for the weighted sum of several objectives."""
        module, several = self._optuna.importance, self._objective.multi_objective
        class_name = {"ped_anova": "PedAnovaImportanceEvaluator", "fanova": "FanovaImportanceEvaluator"}[evaluator]
        instance = getattr(module, class_name)(**({"seed": 0} if evaluator == "fanova" else {}))
        target = (lambda trial: self._objective.total(trial.values)) if several or evaluator == "fanova" else None
        with quiet_optuna(self._optuna):
            shares = module.get_param_importances(self._study, evaluator=instance, target=target)
        return {name: float(share) for name, share in shares.items()}


def open_view(address: str, name: str, coordinates: Sequence[Coordinate], objective: Objective) -> StudyView:
    """Open the Optuna study of a search, and create it if it does not exist.

    ``address`` is the path of a journal file, or the address of a database (``postgresql://…``). ``name`` is the name
    of the study, which must be different for each search.

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
    return StudyView(study, coordinates, objective)


def view_storage(address: str) -> Any:
    """Return an Optuna storage for the path of a journal file or the address of a database."""
    optuna = import_optional("optuna")
    if "://" in address:
        return _connect(address, lambda: optuna.storages.RDBStorage(address))
    file = Path(address)
    with disk_errors_refused(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))


def parameter_importances(study: Study, evaluator: Evaluator = "ped_anova") -> Importances:
    """Compute the importance of each coordinate from the trials of a search.

    Raises:
        InvalidInput: Optuna is not installed.
    """
    trials = [trial for trial in study.trials if trial.point and not trial.problem]
    if len(trials) < _MIN_TRIALS:
        return Importances({}, evaluator, len(trials), reason=f"fewer than {_MIN_TRIALS} trials have a score")
    if len({trial.scores for trial in trials}) < 2:
        return Importances({}, evaluator, len(trials), reason="all trials have the same score")
    optuna = import_optional("optuna")
    with quiet_optuna(optuna):
        directions = ["maximize"] * len(trials[0].scores)
        optuna_study = optuna.create_study(storage=optuna.storages.InMemoryStorage(), directions=directions)
    view = StudyView(optuna_study, study.coordinates, study.objective)
    view.record(trials)
    return Importances(view.importances(evaluator), evaluator, len(trials))


def serve_dashboard(address: str, port: int = 8080) -> None:
    """Serve Optuna's dashboard for the storage at ``address`` on 127.0.0.1 until interrupted.

    Raises:
        InvalidInput: optuna-dashboard is not installed.
    """
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

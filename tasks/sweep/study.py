"""Define the trials of a search and its result, the study. Rank trials, and record their scores on disk.

Feasible candidates rank before infeasible ones, infeasible ones rank by the size of their violation (Deb 2000, Comput.
Methods Appl. Mech. Eng. 186:311), and candidates without a score come last. With several objectives the result is a
Pareto front, and its candidate with the best weighted sum is confirmed.

All trials that are scored under the same conditions (parents, documents, scoring) share one ledger, which one sweep
uses at a time. A record is identified by recipe, document set and race, so a sweep with another budget, seed or sampler
reuses it. The ledger is a journal of :mod:`merge_core.files`: after ``kill -9`` it has all records that were appended.

If a merge is refused or contains NaN, this is recorded as the result of its candidate, which has no score. If a worker
dies or exceeds its time limit, the cause may be elsewhere. The candidate is scored a second time, and has no score only
if that fails too. A full disk or a changed input ends the sweep. The next run resumes it.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import CannotDecide, MergegateError, Refused
from mergegate.merge_core.files import (
    JournalLocation,
    RecordJournal,
    disk_errors_refused,
    hold_lock,
    open_journal,
    state_directory,
)
from mergegate.tasks.base.stage import home
from mergegate.tasks.base.store import digest
from mergegate.tasks.sweep.objective import MetricKey, Objective, Race, ScoresByMetric
from mergegate.tasks.sweep.settings import Point, SoupRule, SweepSettings
from mergegate.tasks.sweep.space import Coordinate, Space

SearchedSet = Literal["search", "confirmation"]
SearchEnd = Literal["trials", "hours", "cost"]
IngredientOutcome = Literal["first", "kept", "removed", "not tested", "not added", "no score"]
INGREDIENT, SOUP = "ingredient", "soup"  # origins of the trials of a soup


@dataclass(frozen=True)
class TrialRequest:
    """Request to score a candidate. Picklable."""

    recipe: Mapping[str, Any]  # as parsed YAML, without placeholders
    document_set: SearchedSet = "search"
    race: Race | None = None  # rule that may drop the candidate early; None: it is scored on all documents
    directory: Path | None = None  # directory to which relative paths in the recipe refer


@dataclass(frozen=True)
class TrialScores:
    """Scores of one candidate."""

    table: ScoresByMetric  # for a dropped candidate, only the first documents
    dropped: bool = False  # whether the race dropped the candidate before all documents were evaluated
    change: float = float("nan")  # |merge - base| / |base| over all tensors; NaN if it was not measured
    seconds: Mapping[str, float] = field(default_factory=dict)  # wall time by activity: merge, load, score
    problem: str = ""  # why there is no score: the merge was refused or contains NaN


@dataclass(frozen=True)
class Trial:
    """Candidate of a search, with its parameters and scores. See ``TrialScores`` for ``dropped`` to ``problem``."""

    number: int  # from 0, in the order of proposal
    generation: int  # -1 for a hand-written recipe
    origin: str  # 'hand-written', 'sampler' or 'baseline' (random search), INGREDIENT or SOUP
    label: str  # name of a hand-written recipe or of an ingredient, or empty
    point: Point  # values by name of coordinate
    # One number per objective; more is better. A dropped trial has the incumbent's score plus the observed mean
    # difference. If there is a problem, scores are NaN.
    scores: tuple[float, ...]
    violation: float = 0.0  # sum of all constraint violations, in the unit of the scores; 0 if feasible
    documents: float = 1.0  # share of the search documents that were evaluated, in (0, 1]
    dropped: bool = False
    change: float = float("nan")
    seconds: float = 0.0  # in total
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the trial has a score on all documents."""
        return not (self.dropped or self.problem) and bool(self.scores) and not any(map(math.isnan, self.scores))


@dataclass(frozen=True)
class HandWritten:
    """Recipe written by a user, which the winner must beat."""

    label: str
    recipe: Mapping[str, Any]
    directory: Path | None = None


class IngredientResult(BaseModel):
    """Result for one ingredient of a soup, in the unit of the scores.

    ``first`` is the best model, with which the soup begins. ``kept`` and ``removed`` ingredients were tested on the
    confirmation documents. Ingredients after the first removed one are ``not tested``, and do not belong to the soup.
    ``not added`` ingredients lowered the score on the search documents. The rule ``uniform`` keeps all ingredients.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ingredient: str  # short name of the model
    outcome: IngredientOutcome
    alone: float | None = None  # score of the ingredient alone on the search documents
    searched: float | None = None  # change of the score on the search documents when it joined the soup
    contribution: float | None = None  # change of the score on the confirmation documents
    low: float | None = None  # one-sided lower bound of the contribution
    problem: str = ""  # reason for a missing score


class SoupResult(BaseModel):
    """Result for the ingredients of a soup, best first. The unit is that of the scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: SoupRule
    margin: float  # the contribution of each ingredient must be above minus this
    confidence: float  # one-sided, that every ingredient of the soup contributes more than minus the margin
    ingredients: tuple[IngredientResult, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the ingredients that the search chose."""
        left_out = ("not added", "no score")
        return tuple(position for position, item in enumerate(self.ingredients) if item.outcome not in left_out)


@dataclass(frozen=True)
class SearchProgress:
    """Progress of a running search."""

    trials: int
    budget: int  # largest number of trials
    generation: int  # -1 for the hand-written recipes
    best: float | None = None  # best score so far; None until a trial has a score
    best_number: int | None = None  # number of the trial with this score
    hand_written: float | None = None  # best score of a hand-written recipe
    seconds_left: float | None = None  # an estimate; None until a trial has been scored in this run
    spent: float | None = None  # money so far; None without ``cost_per_hour``


@dataclass(frozen=True)
class Study:
    """Result of a search that has ended."""

    settings: SweepSettings
    objective: Objective
    coordinates: tuple[Coordinate, ...]
    trials: tuple[Trial, ...]  # sorted by number
    best: Trial | None  # without hand-written recipes; None if no such trial has a score
    front: tuple[Trial, ...]  # Pareto front; empty with one objective
    sizes: Mapping[MetricKey, int]  # number of search documents
    tables: Mapping[int, ScoresByMetric]  # of the hand-written recipes and of the best candidates, by trial number
    recipes: Mapping[int, Mapping[str, Any]]  # of the trials in ``tables``, by trial number
    population: int  # candidates in each generation of the sampler
    scored_count: int  # number of different recipes that were scored: trials with the same recipe share its scores
    new_count: int  # number of trials that were scored in this run
    seconds: Mapping[str, float]  # by activity; 'wall' is the elapsed time, others are totals over all trials
    spent: float | None  # money; None without ``cost_per_hour``
    stop_reason: SearchEnd  # limit of the budget that ended the search
    soup: SoupResult | None = None  # before the confirmation; None if free parameters were searched
    # Trials of nested soups: the best model, then the soup after each model that joined. With the rule ``uniform``,
    # only the best model and the average of all models.
    soup_chain: tuple[int, ...] = ()

    def summary(self) -> str:
        """Return ``60 trials, best -0.0049 (hand-written -0.0072) · 63 % of the documents evaluated``."""
        best = f"best {self.objective.total(self.best.scores):.4g}" if self.best else "no candidate has a score"
        by_hand = f"{self.objective.total(self.reference.scores):.4g}"
        source = "" if self.new_count else ", all cached"
        effort = (
            "" if self.evaluated_share == 1 else f" · {100 * self.evaluated_share:.0f} % of the documents evaluated"
        )
        if self.soup:
            chosen = f"{len(self.soup.positions)} of {len(self.soup.ingredients)} models"
            return f"{self.soup.rule} soup of {chosen}, {len(self.trials)} trials{source}, {best}"
        return f"{len(self.trials)} trials{source}, {best} (hand-written {by_hand}){effort}"

    @property
    def hand_written(self) -> tuple[Trial, ...]:
        """Trials of hand-written recipes. The first is the searched recipe with its start values."""
        return tuple(trial for trial in self.trials if trial.origin == "hand-written")

    @property
    def reference(self) -> Trial:
        """Trial of the hand-written recipe with the best score on the documents of the search."""
        return best_of(self.hand_written, self.objective) or self.hand_written[0]

    @property
    def evaluated_share(self) -> float:
        """Share of the search documents that were evaluated, averaged over all candidates."""
        shares = [trial.documents for trial in self.trials if trial.origin != "hand-written" and not trial.problem]
        return sum(shares) / len(shares) if shares else 1.0


def rank(scores: Sequence[Sequence[float]], violations: Sequence[float], objective: Objective) -> list[int]:
    """Return each candidate's rank by Deb's rule (see the module), from 0 for the best. Ties share a rank."""
    keys = [_key(values, violation, objective) for values, violation in zip(scores, violations, strict=True)]
    ranks = {key: position for position, key in enumerate(sorted(set(keys)))}
    return [ranks[key] for key in keys]


def best_of(trials: Sequence[Trial], objective: Objective) -> Trial | None:
    """Return the first best trial by Deb's rule among those evaluated on all documents, or None if there is none."""
    complete = [trial for trial in trials if trial.is_complete]
    return min(complete, key=lambda trial: (_key(trial.scores, trial.violation, objective), trial.number), default=None)


def front(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the feasible trials on the Pareto front, sorted by number.

    For a trial on the front, no other feasible trial is at least as good in every objective and better in one.
    """
    feasible = [trial for trial in trials if trial.is_complete and trial.violation == 0]
    optimal = [
        trial
        for trial in feasible
        if not any(
            rival.scores != trial.scores and all(a >= b for a, b in zip(rival.scores, trial.scores, strict=True))
            for rival in feasible
        )
    ]
    return tuple(sorted(optimal, key=lambda trial: trial.number))


def _key(scores: Sequence[float], violation: float, objective: Objective) -> tuple[int, float]:
    total = objective.total(scores) if scores else math.nan
    if math.isnan(total) or math.isnan(violation):
        return (2, 0.0)
    return (1, violation) if violation > 0 else (0, -total)


ScoreAll = Callable[[Sequence[TrialRequest]], Iterator[tuple[int, TrialScores | Exception]]]
_NAME_DIGITS = 32  # number of hex digits of the key in the name of its directory


class Ledger:
    """Scored trials by key. Create it with :func:`open_ledger`.

    It also counts the wall time of the study with the key ``study``. ``clock`` returns the time in seconds.
    """

    def __init__(self, journal: RecordJournal, study: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal, self._study, self._clock, self._opened = journal, study, clock, clock()
        self._scores: dict[str, TrialScores] = {}
        self._used = 0.0
        for record in journal.records:
            if "scored" in record:
                self._scores[record["scored"]] = _read_scores(record)
            if record["study"] == study:
                self._used = max(self._used, record["used"])

    def __len__(self) -> int:
        return len(self._scores)

    def find(self, key: str) -> TrialScores | None:
        """Return the scores stored under ``key``, or None."""
        return self._scores.get(key)

    def add(self, key: str, scores: TrialScores) -> None:
        """Record the scores of a trial. Scores of documents are stored as bytes, which are exact and fast to read."""
        packed = [
            [*metric_key, base64.b64encode(np.ascontiguousarray(numbers, dtype="<f8").tobytes()).decode()]
            for metric_key, numbers in scores.table.items()
        ]
        self._scores[key] = scores
        self._journal.append(
            {
                "scored": key,
                "sheet": packed,
                "dropped": scores.dropped,
                "change": scores.change,
                "seconds": dict(scores.seconds),
                "problem": scores.problem,
                "study": self._study,
                "used": self.used_seconds,
            }
        )

    @property
    def used_seconds(self) -> float:
        """Wall time spent searching this study, in seconds, summed over all runs."""
        return self._used + self._clock() - self._opened


@contextmanager
def open_ledger(
    scoring: str, study: str, on_wait: Callable[[], None] = lambda: None, root: Path | None = None
) -> Iterator[Ledger]:
    """Open the ledger of all trials with the same scoring conditions, exclusively for this process.

    Args:
        scoring: Digest of everything that determines a score except recipe, document set and race; 64 hex digits.
        study: Key of the study (see :func:`study_key`).
        on_wait: Callback that is called once if another sweep holds the ledger. Default: do nothing.
        root: Directory of the ledgers. Default: ``sweeps`` in the project's state directory.
    """
    directory = (root or home() / "sweeps") / scoring[:_NAME_DIGITS]
    with disk_errors_refused(directory):
        state_directory(directory)
    with (
        hold_lock(directory / "lock", required=False, on_wait=on_wait),
        open_journal(JournalLocation(directory / "trials.journal", scoring), _is_valid_record) as journal,
    ):
        ledger = Ledger(journal, study)
        try:
            yield ledger
        finally:
            # Record the time since the last trial.
            journal.append({"study": study, "used": ledger.used_seconds})


def study_key(space: Space, settings: SweepSettings) -> str:
    """Return the key of a search, a digest of its recipe and settings, without budget, confidence and documents."""
    relevant = settings.model_dump(exclude={"budget", "confidence", "documents", "optuna_storage"})
    return digest({"recipe": space.recipe, "layers": space.layers, "settings": relevant})


def request_key(request: TrialRequest) -> str:
    """Return the key of a trial, a digest of its recipe, document set and race.

    All recipes of a sweep are relative to the directory of the searched recipe, which the key states as ``.``.
    """
    race = request.race.digest() if request.race else ""
    return digest({"recipe": request.recipe, "from": ".", "set": request.document_set, "race": race})


def score_once(
    requests: Sequence[TrialRequest],
    score_all: ScoreAll,
    ledger: Ledger,
    *,
    on_scored: Callable[[TrialScores], None] = lambda scores: None,
) -> tuple[TrialScores, ...]:
    """Return the scores of candidates in the order of ``requests``. Candidates in the ledger are not scored again.

    Args:
        requests: Candidates to score.
        score_all: Function that yields results in any order, each with the index of its request.
        ledger: Store of scores. Each result is recorded as soon as it arrives.
        on_scored: Callback for each new result. Default: do nothing.

    Raises:
        MergegateError: The sweep cannot continue on this machine, or all candidates crashed.
    """
    keys = [request_key(request) for request in requests]
    unscored = {key: request for key, request in zip(keys, requests, strict=True) if ledger.find(key) is None}

    def score_pending(pending: dict[str, TrialRequest]) -> dict[str, Exception]:
        """Score the requests, and return the errors whose cause may not be the candidate."""
        crashed = {}
        for number, result in score_all(list(pending.values())) if pending else ():
            key = list(pending)[number]
            if isinstance(result, CannotDecide):
                raise result
            if isinstance(result, Exception):
                crashed[key] = result
                continue
            ledger.add(key, result)
            on_scored(result)
        return crashed

    crashed = score_pending({key: unscored[key] for key in score_pending(unscored)})
    # If all candidates crash, the cause is not the candidates.
    if crashed and len(crashed) == len(set(keys)) and (len(crashed) > 1 or not len(ledger)):
        first = next(iter(crashed.values()))
        if isinstance(first, MergegateError):
            raise first
        raise Refused(
            "sweep",
            found=f"all {len(crashed)} candidates crashed their process: {_error_text(first)}",
            expected="processes that survive a trial",
            remedy="find out why they died (out of memory?), then run again: the sweep resumes where it stopped",
        ) from first
    for key, error in crashed.items():
        scores = TrialScores({}, problem=f"no score in two tries: {_error_text(error)}")
        ledger.add(key, scores)
        on_scored(scores)
    return tuple(stored for key in keys if (stored := ledger.find(key)) is not None)


def _error_text(error: Exception) -> str:
    text = str(error).strip()
    return text if isinstance(error, MergegateError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _is_valid_record(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("used"), float):
        return False
    if "scored" not in record:
        return True
    try:
        _read_scores(record)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _read_scores(record: Mapping[str, Any]) -> TrialScores:
    table = {
        MetricKey(*key): np.frombuffer(base64.b64decode(packed), dtype="<f8").astype(np.float64)
        for *key, packed in record["sheet"]
    }
    return TrialScores(
        table, bool(record["dropped"]), float(record["change"]), dict(record["seconds"]), str(record["problem"])
    )

"""Score each candidate once, and record its scores on disk, so that a killed sweep can resume.

All trials that are scored under the same conditions (parents, documents, scoring) share one file, which one sweep uses
at a time. A record is identified by recipe, document set and race, so a sweep with another budget, seed or sampler
reuses it. The file is a journal of :mod:`merge_core.files`: after ``kill -9`` it has all records that were appended.

If a merge is refused or contains NaN, this is recorded as the result of its candidate, which has no score. If a worker
dies or exceeds its time limit, the cause may be elsewhere. The candidate is scored a second time, and has no score only
if that fails too. A full disk or a changed input ends the sweep. The next run resumes it.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mergegate.merge_core.errors import CannotDecide, MergegateError, Refused
from mergegate.merge_core.files import (
    JournalLocation,
    RecordJournal,
    disk_errors_refused,
    hold_lock,
    open_journal,
    state_directory,
)
from mergegate.tasks.stage import home
from mergegate.tasks.store import digest
from mergegate.tasks.sweep.objective import MetricKey
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import Space
from mergegate.tasks.sweep.study import TrialRequest, TrialScores

ScoreAll = Callable[[Sequence[TrialRequest]], Iterator[tuple[int, TrialScores | Exception]]]
_NAME_DIGITS = 32  # number of hex digits of the key in the name of its directory


class Ledger:
    """Scored trials by key. Create it with :func:`open_ledger`.

    Args:
        journal: Open journal, locked by this process.
        study: Key of the study whose wall time is counted (see :func:`study_key`).
        clock: Function that returns the time in seconds. Default: a monotonic clock.
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
                "seconds": dict(scores.seconds or {}),
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

    Raises:
        DiskUnavailable: The state directory cannot be created.
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


def request_key(request: TrialRequest, directory: Path | None = None) -> str:
    """Return the key of a trial, a digest of its recipe, document set and race.

    The directory of the recipe is part of the key as a path relative to ``directory``.
    """
    relative_path = os.path.relpath(request.directory, directory) if request.directory and directory else "."
    race = request.race.digest() if request.race else ""
    return digest({"recipe": request.recipe, "from": relative_path, "set": request.document_set, "race": race})


def score_once(
    requests: Sequence[TrialRequest],
    score_all: ScoreAll,
    ledger: Ledger,
    *,
    directory: Path | None = None,
    on_scored: Callable[[TrialScores], None] = lambda scores: None,
) -> tuple[TrialScores, ...]:
    """Return the scores of candidates in the order of ``requests``. Candidates in the ledger are not scored again.

    Args:
        requests: Candidates to score.
        score_all: Function that yields results in any order, each with the index of its request.
        ledger: Store of scores. Each result is recorded as soon as it arrives.
        directory: Directory of the searched recipe. Default: none.
        on_scored: Callback for each new result. Default: do nothing.

    Raises:
        MergegateError: The sweep cannot continue on this machine, or all candidates crashed.
    """
    keys = [request_key(request, directory) for request in requests]
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

"""Record every scored trial on disk, so that a killed sweep can be replayed.

All trials that are scored under the same conditions (parents, documents, scoring) share one file. A record is
identified by its recipe, document set and race, so a sweep with another budget, seed or sampler reuses existing scores.
The file is a journal of :mod:`merge_core.files`: after ``kill -9`` all appended records are there, and a torn line is
cut off.

One sweep at a time owns the file. A second sweep waits for it, and then finds all records of the first.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mergegate.merge_core.files import (
    JournalPlace,
    RecordJournal,
    disk_errors_refused,
    locked,
    open_journal,
    state_directory,
)
from mergegate.tasks.stage import home
from mergegate.tasks.store import digest
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import Space
from mergegate.tasks.sweep.trials import MetricKey, Sheet, TrialRequest, TrialScores

_NAME = 32  # number of hex digits of the key in the name of its directory


class Ledger:
    """Scored trials by key. Create it with :func:`open_ledger`.

    Args:
        journal: Open journal, owned by this process.
        study: Key of the study whose wall time is counted.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, journal: RecordJournal, study: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal, self._study, self._clock, self._opened = journal, study, clock, clock()
        self._known: dict[str, TrialScores] = {}
        self._used = 0.0
        for record in journal.records:
            if "scored" in record:
                self._known[record["scored"]] = _scores_of(record)
            if record["study"] == study:
                self._used = max(self._used, record["used"])

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: str) -> TrialScores | None:
        """Return the scores stored under ``key``, or None."""
        return self._known.get(key)

    def add(self, key: str, scores: TrialScores) -> None:
        """Store the scores of a trial."""
        self._known[key] = scores
        self._journal.append({"scored": key, **_record_of(scores), **self._time()})

    @property
    def used(self) -> float:
        """Wall time spent searching this study, in seconds, summed over all runs."""
        return self._used + self._clock() - self._opened

    def note_time(self) -> None:
        """Record the time used so far, for time that no trial accounts for."""
        self._journal.append(self._time())

    def _time(self) -> dict[str, Any]:
        return {"study": self._study, "used": self.used}


@contextmanager
def open_ledger(
    scoring: str, study: str, on_wait: Callable[[], None] = lambda: None, place: Path | None = None
) -> Iterator[Ledger]:
    """Open the ledger of all trials with the same scoring conditions, exclusively for this process.

    Args:
        scoring: Digest of everything that determines a score except recipe, set and race. 64 hex digits.
        study: Key of the study, from :func:`study_key`.
        on_wait: Callback, called once if another sweep holds the ledger.
        place: Directory of the ledgers. Default: ``sweeps`` in the project's state directory.

    Raises:
        DiskUnavailable: The state directory cannot be created.
    """
    directory = (place or home() / "sweeps") / scoring[:_NAME]
    with disk_errors_refused(directory):
        state_directory(directory)
    with (
        locked(directory / "lock", required=False, on_wait=on_wait),
        open_journal(JournalPlace(directory / "trials.journal", scoring), _is_valid_record) as journal,
    ):
        ledger = Ledger(journal, study)
        try:
            yield ledger
        finally:
            ledger.note_time()


def study_key(space: Space, settings: SweepSettings) -> str:
    """Return the key of a search: the recipe with its free parameters and the search settings, but not the budget."""
    relevant = settings.model_dump(exclude={"budget", "confidence", "documents", "optuna_storage"})
    return digest({"recipe": space.recipe, "layers": space.layers, "settings": relevant})


def request_key(request: TrialRequest, directory: Path | None = None) -> str:
    """Return the key of one trial, computed from recipe, document set and race.

    The location of the recipe counts only relative to ``directory``.
    """
    relative_path = os.path.relpath(request.directory, directory) if request.directory and directory else "."
    race = request.race.digest() if request.race else ""
    return digest({"recipe": request.recipe, "from": relative_path, "set": request.set, "race": race})


def _is_valid_record(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("used"), float):
        return False
    if "scored" not in record:
        return True
    try:
        _scores_of(record)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _record_of(scores: TrialScores) -> dict[str, Any]:
    """Return the scores as JSON values.

    The numbers of documents are stored as bytes: exact, including NaN, and fast to read.
    """
    return {
        "sheet": [[*key, _pack(numbers)] for key, numbers in scores.sheet.items()],
        "dropped": scores.dropped,
        "change": scores.change,
        "seconds": dict(scores.seconds or {}),
        "problem": scores.problem,
    }


def _scores_of(record: Mapping[str, Any]) -> TrialScores:
    sheet: Sheet = {MetricKey(*key): _unpack(packed) for *key, packed in record["sheet"]}
    return TrialScores(
        sheet, bool(record["dropped"]), float(record["change"]), dict(record["seconds"]), str(record["problem"])
    )


def _pack(numbers: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f8").tobytes()).decode()


def _unpack(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype="<f8").astype(np.float64)

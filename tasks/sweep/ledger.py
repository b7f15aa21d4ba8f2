"""Every scored trial, on disk: what a killed sweep is replayed from.

One file for all that decides a score alike (parents, documents, scoring): a record belongs to a recipe, a set of
documents and a race, so a sweep with another budget, seed or sampler finds what has been scored already. A journal of
:mod:`merge_core.files`: after ``kill -9`` all that was appended is there, a torn line is cut.

One sweep at a time has it; a second one waits, and then finds everything.
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

_NAME = 32  # hex digits of a key that name its directory


class Ledger:
    """Scored trials by key. Made by :func:`open_ledger`.

    Args:
        journal: Open, for this process alone.
        study: Whose time is counted.
        clock: Seconds.
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
        """What was scored under ``key``; None: nothing yet."""
        return self._known.get(key)

    def add(self, key: str, scores: TrialScores) -> None:
        """Keep what was scored."""
        self._known[key] = scores
        self._journal.append({"scored": key, **_record_of(scores), **self._time()})

    @property
    def used(self) -> float:
        """Seconds of wall time in which this study was being searched, all runs together."""
        return self._used + self._clock() - self._opened

    def note_time(self) -> None:
        """Keep the time that was used, where no trial says it."""
        self._journal.append(self._time())

    def _time(self) -> dict[str, Any]:
        return {"study": self._study, "used": self.used}


@contextmanager
def open_ledger(
    scoring: str, study: str, on_wait: Callable[[], None] = lambda: None, place: Path | None = None
) -> Iterator[Ledger]:
    """The ledger of all that is scored alike, for this process alone.

    Args:
        scoring: Digest of everything that decides a score but for recipe, set and race: 64 hex digits.
        study: Of :func:`study_key`.
        on_wait: Called once if another sweep has it.
        place: Directory; absent: below the project's state.

    Raises:
        DiskRefused: The state directory cannot be made.
    """
    directory = (place or home() / "sweeps") / scoring[:_NAME]
    with disk_errors_refused(directory):
        state_directory(directory)
    with (
        locked(directory / "lock", required=False, on_wait=on_wait),
        open_journal(JournalPlace(directory / "trials.journal", scoring), _fits) as journal,
    ):
        ledger = Ledger(journal, study)
        try:
            yield ledger
        finally:
            ledger.note_time()


def study_key(space: Space, settings: SweepSettings) -> str:
    """Of a search: what is free in which recipe, and how it is searched, however long."""
    said = settings.model_dump(exclude={"budget", "confidence", "documents", "view"})
    return digest({"recipe": space.recipe, "layers": space.layers, "settings": said})


def request_key(request: TrialRequest, directory: Path | None = None) -> str:
    """Of one trial: recipe, set and race. Where the recipe lies counts only as seen from ``directory``."""
    place = os.path.relpath(request.directory, directory) if request.directory and directory else "."
    race = request.race.digest() if request.race else ""
    return digest({"recipe": request.recipe, "from": place, "set": request.set, "race": race})


def _fits(record: Any) -> bool:
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
    """What JSON knows. Numbers of documents as bytes: exact, NaN too, and read in no time."""
    return {
        "sheet": [[*asked, _packed(numbers)] for asked, numbers in scores.sheet.items()],
        "dropped": scores.dropped,
        "change": scores.change,
        "seconds": dict(scores.seconds or {}),
        "problem": scores.problem,
    }


def _scores_of(record: Mapping[str, Any]) -> TrialScores:
    sheet: Sheet = {MetricKey(*asked): _unpacked(packed) for *asked, packed in record["sheet"]}
    return TrialScores(
        sheet, bool(record["dropped"]), float(record["change"]), dict(record["seconds"]), str(record["problem"])
    )


def _packed(numbers: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f8").tobytes()).decode()


def _unpacked(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype="<f8").astype(np.float64)

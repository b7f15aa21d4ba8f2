"""A run's log for machines: a line of JSON for each stage and for each thing that was logged, with run, stage and key.

::

    MERGEGATE_LOG=/var/log/mergegate.jsonl mergegate run profiles/nightly.yaml        # or "-": standard error
    {"time": "2026-11-22T03:00:12.113+00:00", "level": "info", "event": "stage ended", "stage": "merge", "subject": "",
     "key": "5f0c…", "status": "made", "seconds": 4.1, "run": "0197…", "flow": "release", "profile": "support", …}

Off by default. Lines are appended whole, so several runs may share a file. Nothing that goes wrong with it is an error
of the run.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from mergegate.tasks.stage.progress import (
    RelayedProgress,
    StageStatus,
    Watcher,
    progress_watcher,
    running_stage,
    watcher_or,
)

LOG = "MERGEGATE_LOG"
_LONGEST = 8000  # characters of a message
# Prefect's loggers do not tell the root's handlers.
_LOGGERS = ("", "prefect")
_LEVELS: Mapping[StageStatus, str] = {"refused": "warning", "failed": "error"}


class JsonLog(logging.Handler):
    """Where lines go.

    Args:
        place: A file, or ``-``.
        about: What stands in each line: the run, its flow, its profile.

    Raises:
        OSError: when the file cannot be opened.
    """

    def __init__(self, place: str, about: Mapping[str, str]) -> None:
        super().__init__(logging.INFO)
        self._about = dict(about)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.dup(sys.stderr.fileno()) if place == "-" else os.open(place, flags, 0o640)

    def say(self, event: str, *, level: str = "info", **fields: object) -> None:
        """One line. A disk that does not take it costs the line, not the run."""
        stage, subject, key = running_stage()
        line: dict[str, object] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level}
        line |= {"event": event, "stage": stage, "subject": subject, "key": key} | fields | self._about
        told = json.dumps({name: value for name, value in line.items() if value != ""}, default=str)
        try:
            os.write(self._file, told.encode(errors="replace") + b"\n")
        except OSError:
            return

    def emit(self, record: logging.LogRecord) -> None:
        """What anybody logs, with its traceback in the same line."""
        try:
            fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()[:_LONGEST]}
            if record.exc_info and record.exc_info[0]:
                fields["exception"] = logging.Formatter().formatException(record.exc_info)[-_LONGEST:]
            self.say("log", level=record.levelname.lower(), **fields)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """The end of it."""
        os.close(self._file)
        super().close()


class _LoggedProgress(RelayedProgress):
    """A ``Watcher`` that has what is announced, and stages that start and end, written, and passes it on."""

    def __init__(self, other: Watcher, log: JsonLog) -> None:
        super().__init__(other)
        self._log = log

    def announced(self, text: str) -> None:
        self._log.say("announced", message=text)
        super().announced(text)

    def started(self, stage: str, subject: str) -> None:
        self._log.say("stage started", stage=stage, subject=subject)
        super().started(stage, subject)

    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        found = {"status": status, "seconds": round(seconds, 3), "message": summary}
        self._log.say("stage ended", level=_LEVELS.get(status, "info"), stage=stage, subject=subject, **found)
        super().ended(stage, subject, status, seconds, summary)


@contextmanager
def logged_for_machines(
    about: Mapping[str, str], otherwise: Callable[[], Watcher], environment: Mapping[str, str] = os.environ
) -> Iterator[Callable[..., None]]:
    """Write a log of what happens inside, where somebody asked for one; what says a further line.

    Args:
        about: What stands in each line.
        otherwise: Who is told of stages where nobody watches.
    """
    place = environment.get(LOG)
    if not place:
        yield lambda event, **fields: None
        return
    try:
        log = JsonLog(place, about)
    except OSError as failure:
        logging.getLogger(__name__).warning("%s=%s: %s; no log is written", LOG, place, failure.strerror)
        yield lambda event, **fields: None
        return
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(log)
    try:
        with progress_watcher(_LoggedProgress(watcher_or(otherwise), log)):
            yield log.say
    finally:
        for logger in loggers:
            logger.removeHandler(log)
        log.close()

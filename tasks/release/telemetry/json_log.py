"""Write a machine-readable log of a run: one line of JSON for each stage event and log message.

::

    MERGEGATE_LOG=/var/log/mergegate.jsonl mergegate run profiles/nightly.yaml        # or "-": standard error
    {"time": "2026-11-22T03:00:12.113+00:00", "level": "info", "event": "stage ended", "stage": "merge", "subject": "",
     "key": "5f0c…", "status": "made", "seconds": 4.1, "run": "0197…", "flow": "release", "profile": "support", …}

The log is off by default. Each line is written in one call, so several runs may share a file. Errors while writing the
log never fail the run.
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

from mergegate.tasks.base.stage import (
    RelayedProgress,
    StageStatus,
    Watcher,
    current_watcher,
    progress_watcher,
    running_stage,
)

LOG = "MERGEGATE_LOG"
_MAX_MESSAGE = 8000  # Maximum length of a message in characters.
# Prefect's loggers do not propagate to the handlers of the root logger.
_LOGGERS = ("", "prefect")
_LEVELS: Mapping[StageStatus, str] = {"refused": "warning", "failed": "error"}


class JsonLog(logging.Handler):
    """Log handler that writes lines of JSON to ``path``, or to standard error for ``-``.

    ``common_fields`` are added to each line: the run, its flow and its profile.
    """

    def __init__(self, path: str, common_fields: Mapping[str, str]) -> None:
        super().__init__(logging.INFO)
        self._common_fields = dict(common_fields)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.dup(sys.stderr.fileno()) if path == "-" else os.open(path, flags, 0o640)

    def write(self, event: str, *, level: str = "info", **fields: object) -> None:
        """Write one line with ``event`` and ``fields``. If writing fails, only the line is lost."""
        stage, subject, key = running_stage()
        line: dict[str, object] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level}
        line |= {"event": event, "stage": stage, "subject": subject, "key": key} | fields | self._common_fields
        text = json.dumps({name: value for name, value in line.items() if value != ""}, default=str)
        try:
            os.write(self._file, text.encode(errors="replace") + b"\n")
        except OSError:
            return

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record as one line, including its traceback."""
        try:
            fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()[:_MAX_MESSAGE]}
            if record.exc_info and record.exc_info[0]:
                fields["exception"] = logging.Formatter().formatException(record.exc_info)[-_MAX_MESSAGE:]
            self.write("log", level=record.levelname.lower(), **fields)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        os.close(self._file)
        super().close()


class _LoggedProgress(RelayedProgress):
    """``Watcher`` that logs announcements and the start and end of stages, and forwards everything to another one."""

    def __init__(self, watcher: Watcher, log: JsonLog) -> None:
        super().__init__(watcher)
        self._log = log

    def on_message(self, text: str) -> None:
        self._log.write("announced", message=text)
        super().on_message(text)

    def on_start(self, stage: str, subject: str) -> None:
        self._log.write("stage started", stage=stage, subject=subject)
        super().on_start(stage, subject)

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        result = {"status": status, "seconds": round(seconds, 3), "message": summary}
        self._log.write("stage ended", level=_LEVELS.get(status, "info"), stage=stage, subject=subject, **result)
        super().on_end(stage, subject, status, seconds, summary)


@contextmanager
def json_log(
    common_fields: Mapping[str, str], default: Callable[[], Watcher], environment: Mapping[str, str] = os.environ
) -> Iterator[Callable[..., None]]:
    """Log the block to the file that ``MERGEGATE_LOG`` names, and yield a function that writes more lines.

    ``common_fields`` are added to each line. ``default`` creates a watcher if none is set.
    """
    path = environment.get(LOG)
    if not path:
        yield lambda event, **fields: None
        return
    try:
        log = JsonLog(path, common_fields)
    except OSError as failure:
        logging.getLogger(__name__).warning("cannot write the log %s=%s: %s", LOG, path, failure.strerror)
        yield lambda event, **fields: None
        return
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(log)
    try:
        with progress_watcher(_LoggedProgress(current_watcher(default), log)):
            yield log.write
    finally:
        for logger in loggers:
            logger.removeHandler(log)
        log.close()

"""``mergegate run --events``: print one line of JSON on standard output for each event.

::

    {"event": "started", "time": 1763863200.1, "stage": "evaluate", "subject": "base"}
    {"event": "advanced", "time": …, "stage": "evaluate", "subject": "base", "done": 40, "total": 400, "unit": "…"}
    {"event": "ended", "time": …, "stage": "evaluate", "subject": "base", "status": "made", "seconds": 3, "summary": ""}
    {"event": "announced", "time": …, "text": "remedy 1: density: 0.3"}
    {"event": "finished", "time": …, "status": "released", "message": "…", "findings": [], …}

The last line has the keys of ``--json``. docs/reference/json.md describes all of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from mergegate.merge_core.wording import detail_listener
from mergegate.tasks.stage import StageStatus, progress_watcher, running_stage

_SECONDS_BETWEEN = 1.0  # minimum time between two progress lines of one call


def print_event(event: str, **facts: object) -> None:
    """Print and flush one line. If the reader of the pipe has closed it, discard all further output."""
    try:
        print(json.dumps({"event": event, "time": round(time.time(), 3), **facts}, default=str), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class EventLines:
    """A ``Watcher`` that prints a line of JSON for each event."""

    def __init__(self) -> None:
        self._last_progress: dict[tuple[str, str], float] = {}

    @contextmanager
    def watching(self, *, verbose: bool = False) -> Iterator[None]:
        """Print an event for every stage that runs in the block.

        With ``verbose``, also print details, such as cache keys and subprocesses (``merge_core.wording``).
        """
        with progress_watcher(self), detail_listener(self.on_detail) if verbose else nullcontext():
            yield

    def on_detail(self, line: str) -> None:
        stage, subject, key = running_stage()
        print_event("detail", stage=stage, subject=subject, key=key, text=line)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do nothing, because events do not disturb a prompt."""
        yield

    def on_message(self, text: str) -> None:
        print_event("announced", text=text)

    def on_start(self, stage: str, subject: str) -> None:
        print_event("started", stage=stage, subject=subject)

    def on_progress(self, stage: str, subject: str, count: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - self._last_progress.get((stage, subject), 0.0) < _SECONDS_BETWEEN and count < total:
            return
        self._last_progress[stage, subject] = now
        print_event("advanced", stage=stage, subject=subject, done=count, total=total, unit=unit)

    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        """Ignore the description of a stage, because only terminals show it."""

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        print_event("ended", stage=stage, subject=subject, status=status, seconds=round(seconds, 3), summary=summary)

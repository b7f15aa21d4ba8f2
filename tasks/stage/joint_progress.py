"""Several calls of one stage, told to whoever watches as one: the parts of one task, on one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context

from mergegate.tasks.stage.progress import StageReport, StageStatus, advance, progress_watcher, report_stage


@contextmanager
def join_progress(stage: str, subject: str, sizes: Sequence[int]) -> Iterator[StageReport]:
    """Tell the watcher of one call of ``stage``, although as many are made inside as there are ``sizes``.

    It is told how far all of them are; what those to come will take is reckoned by their sizes (documents). It has
    ended as ``made`` when any was made. The summary is the caller's to fill in. Other stages that are called inside are
    not told of.
    """
    with report_stage(stage, subject) as report:
        parts = _Together(stage, sizes)
        with progress_watcher(parts):
            yield report
        report.status = "made" if parts.made else "cached"


class _Together:
    """A ``Watcher`` of the calls inside, which speaks for all of them to the watcher outside."""

    def __init__(self, stage: str, sizes: Sequence[int]) -> None:
        self._stage = stage
        self._left = list(sizes)  # of the calls that have not ended
        self._before = 0  # units done by those that have
        self._total = 0  # units of the one that runs
        self._outside = copy_context()
        self.made = False

    def announced(self, text: str) -> None:
        """Nothing is, inside a stage."""

    def started(self, stage: str, subject: str) -> None:
        self._total = 0

    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None:
        if stage != self._stage:
            return
        self._total = total
        to_come = round(total * sum(self._left[1:]) / self._left[0])
        self._outside.run(advance, self._before + done, self._before + total + to_come, unit)

    def described(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        """Nothing: many calls are one line, and that is a count."""

    def ended(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        if stage != self._stage:
            return
        del self._left[0]
        if status != "cached":
            self.made = True
            self._before += self._total

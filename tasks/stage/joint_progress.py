"""Report several calls of one stage to the watcher as a single call, such as the parts of one task on one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context

from mergegate.tasks.stage.progress import StageReport, StageStatus, advance, progress_watcher, report_stage


@contextmanager
def join_progress(stage: str, subject: str, sizes: Sequence[int]) -> Iterator[StageReport]:
    """Report all calls of ``stage`` inside the block as one call.

    The watcher sees the joint progress. The amount of work in the remaining calls is estimated from their sizes. The
    status is ``made`` if any call built its artifact. Calls of other stages inside the block are not reported.

    Args:
        stage: Name of the stage.
        subject: Subject of the joint call.
        sizes: Size of each call inside the block, in documents.

    Yields:
        The report of the joint call. The caller fills in its summary.
    """
    with report_stage(stage, subject) as report:
        parts = _JointProgress(stage, sizes)
        with progress_watcher(parts):
            yield report
        report.status = "made" if parts.made else "cached"


class _JointProgress:
    """``Watcher`` of the calls inside the block that reports their joint progress to the outer watcher."""

    def __init__(self, stage: str, sizes: Sequence[int]) -> None:
        self._stage = stage
        self._remaining_sizes = list(sizes)  # Sizes of the running call and those after it.
        self._done_before = 0  # Units of work in the calls that have ended.
        self._total = 0  # Units of work in the running call.
        self._outer_context = copy_context()
        self.made = False

    def on_message(self, text: str) -> None:
        """Do nothing, because stages make no announcements."""

    def on_start(self, stage: str, subject: str) -> None:
        self._total = 0

    def on_progress(self, stage: str, subject: str, completed: int, total: int, unit: str) -> None:
        if stage != self._stage:
            return
        self._total = total
        remaining = round(total * sum(self._remaining_sizes[1:]) / self._remaining_sizes[0])
        self._outer_context.run(advance, self._done_before + completed, self._done_before + total + remaining, unit)

    def on_description(self, stage: str, subject: str, say: Callable[[int], str]) -> None:
        """Do nothing, because the joint line shows a count."""

    def on_end(self, stage: str, subject: str, status: StageStatus, seconds: float, summary: str) -> None:
        if stage != self._stage:
            return
        del self._remaining_sizes[0]
        if status != "cached":
            self.made = True
            self._done_before += self._total

"""Keep the history of all runs of a project: a line per run in ``history.jsonl``, a page per run, and an index page.

::

    archived = keep_run(reports, record, html)     # at the end of every run, however it ended
    read_history(reports).records                  # in the order in which the runs ended
    changes_since(records, record)                 # the first sentences of a report
"""

from mergegate.tasks.report.history.archive import ArchivedPage, file_name, keep_run, run_facts
from mergegate.tasks.report.history.changes import changes_since, format_run_time
from mergegate.tasks.report.history.ledger import HISTORY, History, mend_history, read_history
from mergegate.tasks.report.history.overview import outcome_of_status, render_history, worst_drop
from mergegate.tasks.report.history.record import RunParent, RunRecord, RunScore, RunStage, RunStatus

__all__ = [
    "HISTORY",
    "ArchivedPage",
    "History",
    "RunParent",
    "RunRecord",
    "RunScore",
    "RunStage",
    "RunStatus",
    "changes_since",
    "file_name",
    "format_run_time",
    "keep_run",
    "mend_history",
    "outcome_of_status",
    "read_history",
    "render_history",
    "run_facts",
    "worst_drop",
]

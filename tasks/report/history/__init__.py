"""All runs of a project: a line for each in ``history.jsonl``, a page for each, and one page about all of them.

::

    kept = keep_run(reports, record, html)     # at the end of every run, however it ended
    read_history(reports).records              # in the order in which they ended
    changes_since(records, record)             # what a person wants to know first
"""

from mergegate.tasks.report.history.changes import changes_since, night_of
from mergegate.tasks.report.history.keeping import KeptPage, facts_of, file_name, keep_run
from mergegate.tasks.report.history.ledger import HISTORY, History, mend_history, read_history
from mergegate.tasks.report.history.metrics import tell_operators
from mergegate.tasks.report.history.overview import outcome_of_status, render_history, worst_drop
from mergegate.tasks.report.history.record import NightParent, NightScore, NightStage, RunRecord, RunStatus
from mergegate.tasks.report.history.tracking import tell_tracker

__all__ = [
    "HISTORY",
    "History",
    "KeptPage",
    "NightParent",
    "NightScore",
    "NightStage",
    "RunRecord",
    "RunStatus",
    "changes_since",
    "facts_of",
    "file_name",
    "keep_run",
    "mend_history",
    "night_of",
    "outcome_of_status",
    "read_history",
    "render_history",
    "tell_operators",
    "tell_tracker",
    "worst_drop",
]

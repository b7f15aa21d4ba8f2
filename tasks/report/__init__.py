"""The report of a run: ``report.html``, one self-contained page for a person, and ``report.json`` for machines.

::

    artifact = write_report(ReportContent(...))     # the cached stage
    html = render(content)                          # the page alone
    as_markdown(content), final_table(content)      # the same content for Prefect and for the terminal
    render_sweep(sweep), sweep_table(sweep)         # of a sweep: its page and its table
    render_ending(EndedRun(...))                    # of a run that ended without a verdict
    keep_run(reports, record, html)                 # each page under its own name, in the history of all runs
"""

from tasks.report import wording
from tasks.report.content import (
    Library,
    MergedFile,
    ReportContent,
    ReportedAttempt,
    ReportedCheck,
    ReportedJudge,
    ReportedModel,
    ReportedServing,
    StoredArtifact,
)
from tasks.report.ending import EndedRun, EndedStage, render_ending
from tasks.report.history import (
    HISTORY,
    History,
    KeptPage,
    NightParent,
    NightScore,
    NightStage,
    RunRecord,
    RunStatus,
    changes_since,
    file_name,
    keep_run,
    mend_history,
    night_of,
    outcome_of_status,
    read_history,
    render_history,
    tell_operators,
    tell_tracker,
    worst_drop,
)
from tasks.report.page import render
from tasks.report.serving import CostTable, costs
from tasks.report.stage import Report, write_report
from tasks.report.sweep import (
    HeldOut,
    ReportedBudget,
    ReportedConfirmation,
    ReportedObjective,
    ReportedParameter,
    ReportedRacing,
    ReportedSet,
    SearchStatus,
    SweepContent,
    render_sweep,
    search_line,
    sweep_content,
    sweep_line,
    sweep_outcome,
    sweep_sentence,
    sweep_table,
    sweep_title,
    what_it_took,
)
from tasks.report.table import Row, ScoreTable, as_markdown, evaluated, final_table, likelihood, uses_bytes

__all__ = [
    "HISTORY",
    "CostTable",
    "EndedRun",
    "EndedStage",
    "HeldOut",
    "History",
    "KeptPage",
    "Library",
    "MergedFile",
    "NightParent",
    "NightScore",
    "NightStage",
    "Report",
    "ReportContent",
    "ReportedAttempt",
    "ReportedBudget",
    "ReportedCheck",
    "ReportedConfirmation",
    "ReportedJudge",
    "ReportedModel",
    "ReportedObjective",
    "ReportedParameter",
    "ReportedRacing",
    "ReportedServing",
    "ReportedSet",
    "Row",
    "RunRecord",
    "RunStatus",
    "ScoreTable",
    "SearchStatus",
    "StoredArtifact",
    "SweepContent",
    "as_markdown",
    "changes_since",
    "costs",
    "evaluated",
    "file_name",
    "final_table",
    "keep_run",
    "likelihood",
    "mend_history",
    "night_of",
    "outcome_of_status",
    "read_history",
    "render",
    "render_ending",
    "render_history",
    "render_sweep",
    "search_line",
    "sweep_content",
    "sweep_line",
    "sweep_outcome",
    "sweep_sentence",
    "sweep_table",
    "sweep_title",
    "tell_operators",
    "tell_tracker",
    "uses_bytes",
    "what_it_took",
    "wording",
    "worst_drop",
    "write_report",
]

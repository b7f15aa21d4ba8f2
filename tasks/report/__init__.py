"""The report of a run: ``report.html``, one self-contained page for a person, and ``report.json`` for machines.

::

    artifact = write_report(ReportContent(...))     # the cached stage
    html = render(content)                          # the page alone
    as_markdown(content), final_table(content)      # the same content for Prefect and for the terminal
    render_sweep(sweep), sweep_table(sweep)         # of a sweep: its page and its table
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
    sweep_outcome,
    sweep_sentence,
    sweep_table,
    sweep_title,
    what_it_took,
)
from tasks.report.table import as_markdown, evaluated, final_table, likelihood, uses_bytes

__all__ = [
    "CostTable",
    "HeldOut",
    "Library",
    "MergedFile",
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
    "SearchStatus",
    "StoredArtifact",
    "SweepContent",
    "as_markdown",
    "costs",
    "evaluated",
    "final_table",
    "likelihood",
    "render",
    "render_sweep",
    "search_line",
    "sweep_content",
    "sweep_outcome",
    "sweep_sentence",
    "sweep_table",
    "sweep_title",
    "uses_bytes",
    "what_it_took",
    "wording",
    "write_report",
]

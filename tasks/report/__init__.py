"""The report of a run: ``report.html``, one self-contained page for a person, and ``report.json`` for machines.

::

    artifact = write_report(ReportContent(...))     # the cached stage
    html = render(content)                          # the page alone
    as_markdown(content), final_table(content)      # the same content for Prefect and for the terminal
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
from tasks.report.table import as_markdown, evaluated, final_table, likelihood, uses_bytes

__all__ = [
    "CostTable",
    "Library",
    "MergedFile",
    "Report",
    "ReportContent",
    "ReportedAttempt",
    "ReportedCheck",
    "ReportedJudge",
    "ReportedModel",
    "ReportedServing",
    "StoredArtifact",
    "as_markdown",
    "costs",
    "evaluated",
    "final_table",
    "likelihood",
    "render",
    "uses_bytes",
    "wording",
    "write_report",
]

"""Build the report of a sweep: a self-contained page, the table at the end of a run, and the progress line.

::

    content = sweep_content(study, confirmation, name=…, method=…)
    html = render_sweep(content)                # the page
    sweep_table(content)                        # recipes, winner and baseline, for the terminal and for Markdown
    search_line(SearchStatus(...))              # 'trial 37 of 60 · best …'
"""

from mergegate.tasks.report.sweep.content import (
    HeldOut,
    ReportedBudget,
    ReportedConfirmation,
    ReportedObjective,
    ReportedParameter,
    ReportedRacing,
    ReportedSet,
    SweepContent,
)
from mergegate.tasks.report.sweep.from_study import sweep_content, sweep_line
from mergegate.tasks.report.sweep.page import render_sweep
from mergegate.tasks.report.sweep.search_line import SearchStatus, search_line
from mergegate.tasks.report.sweep.table import sweep_table
from mergegate.tasks.report.sweep.wording import search_effort, sweep_outcome, sweep_sentence, sweep_title

__all__ = [
    "HeldOut",
    "ReportedBudget",
    "ReportedConfirmation",
    "ReportedObjective",
    "ReportedParameter",
    "ReportedRacing",
    "ReportedSet",
    "SearchStatus",
    "SweepContent",
    "render_sweep",
    "search_effort",
    "search_line",
    "sweep_content",
    "sweep_line",
    "sweep_outcome",
    "sweep_sentence",
    "sweep_table",
    "sweep_title",
]

"""Build the report of a run: ``report.html``, one self-contained page for readers, and ``report.json`` for programs.

::

    artifact = write_report(ReportContent(...))     # the cached stage
    html = render(content)                          # only the page
    as_markdown(content), final_table(content)      # the same content for Prefect and for the terminal
    render_sweep(sweep), sweep_table(sweep)         # page and table of a sweep
    render_ending(EndedRun(...))                    # page of a run that ended without a verdict
    render_shadow(shadow)                           # page of a release that is tested on user traffic
    archive_run(reports, record, html)              # archive the page of a run and add the run to the history
"""

from mergegate.tasks.report import wording
from mergegate.tasks.report.content import (
    Library,
    MergedFile,
    ReportContent,
    ReportedAttempt,
    ReportedCheck,
    ReportedJudge,
    ReportedModel,
    ReportedPlace,
    ReportedServing,
    StoredArtifact,
)
from mergegate.tasks.report.ending import EndedRun, EndedStage, add_stages, render_ending
from mergegate.tasks.report.explanation_text import recipe_diff
from mergegate.tasks.report.history.archive import archive_run, file_name
from mergegate.tasks.report.history.changes import changes_since, format_run_time
from mergegate.tasks.report.history.ledger import HISTORY, History, mend_history, read_history
from mergegate.tasks.report.history.overview import outcome_of_status, render_history, worst_drop
from mergegate.tasks.report.history.record import RunParent, RunRecord, RunScore, RunStage, RunStatus, RunVariant
from mergegate.tasks.report.page import render
from mergegate.tasks.report.shadow.content import LostExample, ReportedArm, ShadowContent, ShadowPoint
from mergegate.tasks.report.shadow.page import render_shadow
from mergegate.tasks.report.shadow.wording import ARM_COLUMNS, arm_cells, shadow_outcome, shadow_rows, shadow_sentence
from mergegate.tasks.report.stage import Report, write_report
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
from mergegate.tasks.report.sweep.from_study import SweepFacts, sweep_content
from mergegate.tasks.report.sweep.page import render_sweep
from mergegate.tasks.report.sweep.search_line import search_line
from mergegate.tasks.report.sweep.wording import (
    search_effort,
    soup_table,
    sweep_outcome,
    sweep_sentence,
    sweep_table,
    sweep_title,
)
from mergegate.tasks.report.table import (
    DECISION_COLUMNS,
    Row,
    ScoreTable,
    as_markdown,
    compares_per_byte,
    costs,
    evaluated_models,
    final_table,
    likelihood,
)
from mergegate.tasks.report.variants import VARIANT_COLUMNS, conversion_sentences, variant_refusals, variant_rows
from mergegate.tasks.report.wording import cut_off_answers, gate_notes, regenerated_answers, thinking_shares

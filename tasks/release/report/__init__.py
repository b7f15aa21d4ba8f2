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

from mergegate.tasks.release.report import wording
from mergegate.tasks.release.report.archive import archive_run, file_name
from mergegate.tasks.release.report.content import (
    Library,
    MergedFile,
    ReportContent,
    ReportedAttempt,
    ReportedModel,
    ReportedPlace,
    ReportedServing,
    StoredArtifact,
)
from mergegate.tasks.release.report.explanation_text import recipe_diff
from mergegate.tasks.release.report.history import (
    HISTORY,
    History,
    RunParent,
    RunRecord,
    RunScore,
    RunStage,
    RunStatus,
    RunVariant,
    changes_since,
    format_run_time,
    mend_history,
    outcome_of_status,
    read_history,
    worst_drop,
)
from mergegate.tasks.release.report.history_page import render_history
from mergegate.tasks.release.report.page import EndedRun, add_stages, render, render_ending
from mergegate.tasks.release.report.shadow import (
    ARM_COLUMNS,
    LostExample,
    ReportedArm,
    ShadowContent,
    ShadowPoint,
    arm_cells,
    render_shadow,
    shadow_outcome,
    shadow_rows,
    shadow_sentence,
)
from mergegate.tasks.release.report.stage import Report, write_report
from mergegate.tasks.release.report.sweep import SweepContent, sweep_content
from mergegate.tasks.release.report.sweep_page import (
    render_sweep,
    search_effort,
    search_line,
    soup_table,
    sweep_outcome,
    sweep_sentence,
    sweep_table,
    sweep_title,
)
from mergegate.tasks.release.report.table_rows import (
    DECISION_COLUMNS,
    VARIANT_COLUMNS,
    Row,
    ScoreTable,
    as_markdown,
    compares_per_byte,
    conversion_sentences,
    costs,
    evaluated_models,
    final_table,
    likelihood,
    variant_refusals,
    variant_rows,
)
from mergegate.tasks.release.report.wording import cut_off_answers, gate_notes, regenerated_answers, thinking_shares

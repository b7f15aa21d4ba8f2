"""A run in Markdown, to be put under a pull request: how it ended, the final table, and the facts of the run.

::

    gh pr comment --body-file .mergegate/reports/nightly.md
"""

from __future__ import annotations

from tasks.report import wording
from tasks.report.content import ReportContent
from tasks.report.history import RunRecord, facts_of, outcome_of_status
from tasks.report.table import as_markdown, literally


def run_markdown(record: RunRecord, content: ReportContent | None) -> str:
    """GitHub-flavoured Markdown.

    Args:
        content: The evidence; None of a run that ended before there was any.
    """
    first, *rest = record.message.splitlines() or [""]
    if content is not None:
        said = [as_markdown(content).rstrip(), "", f"**{literally(first)}**"]
    else:
        glyph = wording.GLYPHS[outcome_of_status(record.status)]
        said = [f"## {glyph} {literally(f'{record.profile}: {record.status}')}", "", literally(first)]
        said += ["", *(f"- {literally(line)}" for line in rest if line.strip())] if rest else []
    facts = [f"{literally(name)} {literally(text)}" for name, text in facts_of(record)]
    return "\n".join([*said, "", f"<sub>{' · '.join(facts)}</sub>"]) + "\n"

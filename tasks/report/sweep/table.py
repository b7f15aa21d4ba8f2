"""Build the table of recipes, winner and baseline for the terminal and for Markdown."""

from __future__ import annotations

from mergegate.tasks.report.sweep.content import SweepContent
from mergegate.tasks.report.sweep.study_facts import recipe_rows
from mergegate.tasks.report.sweep.wording import difference_text, score_text, sweep_outcome, winner_word
from mergegate.tasks.report.table import Row, ScoreTable


def sweep_table(content: SweepContent, objective: int = 0) -> ScoreTable:
    """Return one row per recipe: its search score, its held-out score and the difference.

    No trial of the search has seen the held-out documents. The winner's row has the outcome of the sweep.
    """
    unit = content.objectives[objective].unit
    title = content.objectives[objective].title
    rows = []
    for row in recipe_rows(content, objective):
        numbers = (
            score_text(content, objective, row.search),
            score_text(content, objective, row.held_out),
            difference_text(content, objective, row.optimism),
        )
        name, note = row.label, {"reference": "best by hand"}.get(row.role, "")
        if row.role == "winner":
            name = f"{winner_word(content)}, trial {row.trial}"
            note = {"pass": "confirmed", "fail": "not confirmed", "inconclusive": ""}[sweep_outcome(content)]
        rows.append(Row((name, *numbers, note), sweep_outcome(content) if row.role == "winner" else None))
    return ScoreTable(
        title=f"{title}, {unit}" if unit else title,
        columns=("recipe", "search", "held-out", "optimism", ""),
        rows=tuple(rows),
    )

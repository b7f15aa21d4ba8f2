"""Print tables on a terminal of any width. The score table uses the widest of three forms that fits.

Numbers, names and verdicts are never cut or wrapped. From the widest form to the narrowest:

1. a line per task, a column per model;
2. only the reference of each guard and the merge; the report has all models;
3. the same, with the names of task and reference on a line of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.output import OUTCOME_STYLES
from mergegate.tasks.report import DECISION_COLUMNS, Row, ScoreTable

_BEST = " *"  # ending of the best parent's score, which is printed in bold instead
_DECISION = -len(DECISION_COLUMNS)


@dataclass(frozen=True)
class _Form:
    """A layout of the score table. ``names`` columns at the start have a line of their own, or none have."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    names: int = 0

    def lines(self) -> Iterator[Text]:
        """Yield the header and the rows, with every column as wide as its widest cell."""
        cells = [self.columns, *(row.cells for row in self.rows)]
        widths = [max(cell_len(line[at].removesuffix(_BEST)) for line in cells) for at in range(len(self.columns))]
        for line, row in zip(cells, (None, *self.rows), strict=True):
            if row is not None and self.names:
                task, reference = line[0], line[1]
                yield Text.assemble(task, (f" against {reference}", "dim") if reference else "")
            text = Text("  " if self.names else "")
            for at in range(self.names, len(line)):
                style = "dim" if row is None else "bold" if line[at].endswith(_BEST) else ""
                is_left = at == 0 or self.columns[at] == "reference"
                cell, room = line[at].removesuffix(_BEST), " " * (widths[at] - cell_len(line[at].removesuffix(_BEST)))
                text.append("" if at == self.names else " ")
                if at == len(line) - 1:
                    text.append(cell, "dim" if row is None else OUTCOME_STYLES[row.outcome])
                else:
                    text.append("" if is_left else room).append(cell, style).append(room if is_left else "")
            text.rstrip()
            yield text


def print_scores(console: Console, scores: ScoreTable) -> None:
    """Print the final table in the first form that fits. Notes on verdicts follow below the table."""
    rows, notes = [], []
    for row in scores.rows:
        word, colon, _ = row.cells[-1].partition(": ")
        rows.append(Row((*row.cells[:-1], word), row.outcome, row.reference_score))
        if colon:
            notes.append(f"{row.cells[0]} {row.cells[-1]}")
    models = scores.columns[1:_DECISION]
    full = _Form(scores.columns, tuple(rows))
    pair = ("reference", "score", models[-1], *DECISION_COLUMNS[1:]) if models else DECISION_COLUMNS
    compact = tuple(_with_reference(row, models) for row in rows) if models else tuple(rows)
    forms = [full, _Form((scores.columns[0], *pair), compact), _Form((scores.columns[0], *pair), compact, names=2)]
    drawn = [list(form.lines()) for form in forms]
    lines = next((lines for lines in drawn if max(line.cell_len for line in lines) <= console.width), drawn[-1])
    for line in lines:
        console.print(line)
    if lines is not drawn[0] and len(models) > 2:
        notes.append("Only the reference of each row is shown. The report has all models.")
    for note in (*notes, *filter(None, [scores.note])):
        console.print(Text(note, style="dim"), soft_wrap=False)


def _with_reference(row: Row, models: Sequence[str]) -> Row:
    """Return a row with one column for its reference, or else for the best parent, in place of all parents."""
    *scores, merge = row.cells[1:_DECISION]
    reference, *decision = row.cells[_DECISION:]
    best = next((at for at, score in enumerate(scores) if score.endswith(_BEST)), None)
    score = row.reference_score
    if not reference and not decision[0] and best is not None:
        reference, score = models[best], scores[best]
    return Row((row.cells[0], reference, score, merge, *decision), row.outcome)


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool) -> None:
    """Print a table. On a terminal that is too narrow, print each row as a list of its cells.

    With ``numbers``, all columns between the first and the last align right.
    """
    widths = [max(cell_len(str(line[at])) for line in (columns, *rows)) for at in range(len(columns))]
    if sum(widths) + len(widths) - 1 <= console.width:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        for at, column in enumerate(columns):
            right = numbers and 0 < at < len(columns) - 1
            table.add_column(column, justify="right" if right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    label = max(map(cell_len, columns[1:]), default=0)
    for row in rows:
        console.print(Text(row[0], style="bold"))
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if cell:
                console.print(Text.assemble("  ", (f"{column:<{label}}", "dim"), "  " if label else "", cell))

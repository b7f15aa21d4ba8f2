"""Print tables on a terminal of any width. The score table uses the widest of four forms that fits.

Numbers, names and verdicts are never cut or wrapped. From the widest form to the narrowest:

1. a line per task, a column per model;
2. the same, with letters for models and a legend above;
3. the name of a task on its own line, its numbers below;
4. only the best parent and the merge; the report has all models.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.output import OUTCOME_STYLES
from mergegate.tasks.report import Row, ScoreTable

_BEST = " *"  # ending of the best parent's score, which is printed in bold instead


@dataclass(frozen=True)
class _Form:
    """A layout of the score table: lines above it, its header, and rows that take one or two lines."""

    above: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    two_lines: bool = False  # whether the first cell has its own line

    def widths(self) -> list[int]:
        lines = [self.columns, *(row.cells for row in self.rows)]
        return [max(cell_len(line[at].removesuffix(_BEST)) for line in lines) for at in range(len(self.columns))]

    def width(self) -> int:
        return max(line.cell_len for line in (*map(Text, self.above), *_lines(self)))


def print_scores(console: Console, scores: ScoreTable) -> None:
    """Print the final table in the first form that fits. Details of the verdicts follow below the table."""
    rows, notes = [], []
    for row in scores.rows:
        word, colon, _ = row.cells[-1].partition(": ")
        rows.append(Row((*row.cells[:-1], word), row.outcome))
        if colon:
            notes.append(f"{row.cells[0]} {row.cells[-1]}")
    forms = list(_forms(scores.columns, tuple(rows)))
    form = next((candidate for candidate in forms if candidate.width() <= console.width), forms[-1])
    for line in form.above:
        console.print(Text(line, style="dim"))
    for drawn_line in _lines(form):
        console.print(drawn_line)
    for note in notes:
        console.print(Text(note, style="dim"))


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


def _forms(columns: tuple[str, ...], rows: tuple[Row, ...]) -> Iterator[_Form]:
    yield _Form((), columns, rows)
    models, rest = columns[1:-3], columns[-3:]
    lettered: tuple[str, ...] = models
    above: tuple[str, ...] = ()
    if models and len(models) <= len(string.ascii_lowercase) + 1:
        # The merge keeps its name because the table is about it.
        letters = dict(zip(models[:-1], string.ascii_lowercase, strict=False))
        lettered = (*letters.values(), models[-1])
        above = tuple(f"{letter}  {name}" for name, letter in letters.items())
        yield _Form(above, (columns[0], *lettered, *rest), rows)
        yield _Form(above, (columns[0], *lettered, *rest), rows, two_lines=True)
    few, pair = rows, models
    if len(models) > 1:
        pair, few = ("best parent", models[-1]), ()
        for row in rows:
            *parents, merge = row.cells[1:-3]
            best = next((cell for cell in parents if cell.endswith(_BEST)), next(filter(None, parents), ""))
            few = (*few, Row((row.cells[0], best, merge, *row.cells[-3:]), row.outcome))
    note = ("Only the best parent is shown; the report has all of them.",) if len(models) > 2 else ()
    yield _Form(note, (columns[0], *pair, *rest), few)
    yield _Form(note, (columns[0], *pair, *rest), few, two_lines=True)


def _lines(form: _Form) -> Iterator[Text]:
    """Yield the header and the rows, with every column as wide as its widest cell."""
    yield _aligned(form, [Text(column, style="dim") for column in form.columns])
    for row in form.rows:
        if form.two_lines:
            yield Text(row.cells[0])
        *cells, verdict = row.cells
        texts = [Text(cell.removesuffix(_BEST), style="bold" if cell.endswith(_BEST) else "") for cell in cells]
        yield _aligned(form, [*texts, Text(verdict, style=OUTCOME_STYLES[row.outcome])])


def _aligned(form: _Form, cells: Sequence[Text]) -> Text:
    line, last = Text("  " if form.two_lines else ""), len(cells) - 1
    for at, (cell, width) in enumerate(zip(cells, form.widths(), strict=True)):
        if at == 0 and form.two_lines:
            continue
        room = Text(" " * (width - cell.cell_len))
        between = Text(" " if line.plain.strip() or at > 1 else "")
        line = line + between + (cell + room if at == 0 else cell if at == last else room + cell)
    line.rstrip()
    return line

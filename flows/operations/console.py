"""Print text, tables, findings and JSON objects in the same way for all commands and results.

The width is that of the terminal, or the variable ``COLUMNS``, or 80 columns in a pipe. Text fits it without breaking
or cutting a word. Continuation lines are indented below the text that they continue::

    ✓ power: copy: a drop of 3.1 points is detected with 400 documents, if 0.1 % of
      answers differ

A path or another word that is wider than the terminal stays in one piece, so that it can be copied.

The JSON object of a command has a status, a message, findings, then other keys::

    {"status": "refused", "message": "…", "findings": [{"severity": "block", "where": "…", …}], …}

docs/reference/machine-interface.md describes it for users, docs/schema/answer.json for programs.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from mergegate.merge_core.errors import Finding, FindingGroup, escape_invisible, group_findings

if TYPE_CHECKING:
    from mergegate.tasks.base.stage import Outcome


# Indentation, a mark and a label. Continuation lines start below the text that follows them.
_LEAD = re.compile(r"\s*(?:[^\w\s] +)?(?:expected: |(?:\S+ )?\S+ {2,})?")

_PIECE = re.compile(r"^\s*\S+|\S+")  # the first word keeps its indentation
_DEEP = 6  # columns; a line with a larger indentation already belongs to the line above
# A word with the space before it. An interval and a percentage are one word.
_WORD = re.compile(r"\s*(\[[^\s\]]+ [^\s\]]+\]\S*|[\d.,]+ %\S*|\S+)")


def wrap_line(line: Text, width: int, hang: int | None = None) -> list[Text]:
    """Wrap a line at spaces into lines of ``width`` columns.

    ``hang`` is the indentation of continuation lines. Default: the column of the text after a mark or a label.
    """
    plain = line.plain
    if cell_len(plain) <= width:
        return [line]
    margin = len(plain) - len(plain.lstrip())
    if hang is None:
        lead = _LEAD.match(plain)
        hang = (
            lead.end()
            if lead and margin < lead.end() <= width // 2
            else min(margin if margin > _DEEP else margin + 2, width // 2)
        )
    starts, column, room = [0], 0, width
    for word in _WORD.finditer(plain):
        # A word below the mark and the label gains nothing from a line of its own.
        if column + cell_len(word.group()) > room and word.start(1) > max(hang, starts[-1]):
            starts.append(word.start(1))
            column, room = cell_len(word.group(1)), width - hang
        else:
            column += cell_len(word.group())
    lines = [line[begin:end] for begin, end in zip(starts, [*starts[1:], len(plain)], strict=True)]
    for part in lines:
        part.rstrip()
    return [lines[0], *(Text(" " * hang) + part for part in lines[1:])]


def fit_table(table: Table, width: int) -> Iterator[Table | Text]:
    """Yield the table with columns that fit ``width``, or each row as a list of its cells if no columns fit.

    The widest column without ``no_wrap`` shrinks first, and no column becomes narrower than its longest word.
    """
    columns = [
        [cell for cell in (column.header, *column.cells) if isinstance(cell, str | Text)] for column in table.columns
    ]
    if any(len(cells) <= table.row_count for cells in columns):  # a cell is not text
        yield table
        return
    texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in cells] for cells in columns]
    widths = [max(cell.cell_len for cell in cells) for cells in texts]
    narrowest = [
        most
        if column.no_wrap
        else max((cell_len(word) for cell in cells for word in _PIECE.findall(cell.plain)), default=0)
        for column, cells, most in zip(table.columns, texts, widths, strict=True)
    ]
    _, right, _, left = table.padding
    room = width - (len(widths) - 1) * (right if table.collapse_padding else left + right)
    while sum(widths) > room and (wide := [at for at, size in enumerate(widths) if size > narrowest[at]]):
        widths[max(wide, key=widths.__getitem__)] -= 1
    if sum(widths) <= room:
        for column, size in zip(table.columns, widths, strict=True):
            column.width = size
        yield table
        return
    (_, *titles), *rows = zip(*texts, strict=True)
    label = max(title.cell_len for title in titles)
    if not label:  # the cells of a row without titles read like a sentence
        yield from (Text("  ").join(row) for row in rows)
        return
    for first, *rest in rows:
        yield first
        for title, cell in zip(titles, rest, strict=True):
            if cell.plain:
                yield Text.assemble("  ", (f"{title.plain:<{label}}", "dim"), "  ", cell)


def _with_visible_names(item: RenderableType) -> RenderableType:
    """Return text or a table with the invisible characters of names escaped, so that the text can be measured."""
    if isinstance(item, Table):
        for column in item.columns:
            column.header, *column._cells = map(_with_visible_names, (column.header, *column._cells))
    elif isinstance(item, Text) and (plain := escape_invisible(item.plain)) != item.plain:
        return Text(plain, item.style)
    return escape_invisible(item) if isinstance(item, str) else item


class FittingConsole(Console):
    """A console whose text and tables fit its width."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)  # Text contains names and paths of users, also with brackets.

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable, such as a progress bar, with invisible characters escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_invisible(segment.text))

    def print(self, *objects: Any, sep: str = " ", **options: Any) -> None:
        """Print text wrapped at words, and tables with columns that fit.

        Text with ``no_wrap`` is printed as it is, for example lines to paste into a file. Other options are rich's.
        """
        objects = tuple(map(_with_visible_names, objects))
        if len(objects) == 1 and isinstance(objects[0], Table):
            for part in fit_table(objects[0], self.width):
                super().print(part, **options) if isinstance(part, Table) else self.print(part, **options)
            return
        if objects and all(isinstance(item, str | Text) for item in objects):
            text = Text(sep).join(item if isinstance(item, Text) else Text(item) for item in objects)
            if not options.get("no_wrap"):
                lines = text.split(allow_blank=True)
                text = Text("\n").join(part for line in lines for part in wrap_line(line, self.width))
            objects, options = (text,), {**options, "soft_wrap": True}  # already wrapped
        super().print(*objects, sep=sep, **options)


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


_FINDING_STYLES = {"block": ("✗", "bold red"), "warn": ("!", "yellow"), "info": ("·", "dim")}
_TEXT_WIDTH = 100  # columns of a result as text
OUTCOME_STYLES: Mapping[Outcome | None, str] = {"pass": "green", "inconclusive": "yellow", "fail": "bold red", None: ""}


def print_answer(status: str, message: str, more: Mapping[str, Any], findings: Iterable[Finding] = ()) -> None:
    """Print the JSON object of a command.

    ``status`` is one or two words, such as ``released``, ``refused``, ``sound`` or ``listed``. ``message`` is for
    users. ``findings`` are sorted, worst first. ``more`` contains other keys, which cannot replace these three.
    """
    answer = {"status": status, "message": message, "findings": [asdict(finding) for finding in findings]}
    print(json.dumps({**answer, **{key: value for key, value in more.items() if key not in answer}}, default=str))


def print_created(record: dict[str, Any]) -> None:
    """Print the JSON object of a command that creates files.

    The status is ``made``, or ``nothing new`` if ``record["new"]`` is False.
    """
    status = "made" if record.pop("new", True) else "nothing new"
    print_answer(status, status, record)


def printed_text(draw: Callable[[Console], None]) -> str:
    """Return what ``draw`` prints on a console that is not a terminal, without blank lines around it."""
    console = FittingConsole(file=io.StringIO(), width=_TEXT_WIDTH, highlight=False, force_jupyter=False)
    with console.capture() as capture:
        draw(console)
    return capture.get().strip("\n")


def short_path(path: Path | str) -> str:
    """Return a path relative to the working directory. A URL or a path outside this directory stays as it is."""
    if isinstance(path, str):
        return path
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory was deleted
        return str(path)
    return str(path) if relative.startswith("..") else relative


class CheckSummary(Protocol):
    """Result of checks, apart from their findings."""

    @property
    def summary(self) -> Sequence[str]:
        """One line per successful check."""

    @property
    def exit_code(self) -> int:
        """Exit code of a command that only checks."""


def print_findings(
    findings: Sequence[Finding], problems: CheckSummary, console: Console, *, verbose: bool = False
) -> None:
    """Print each finding with its remedy, worst first, then the lines about successful checks.

    Findings with the same cause are printed once, or separately with ``verbose``.
    """
    groups = tuple(map(FindingGroup, findings)) if verbose else group_findings(findings)
    for group in groups:
        finding = group.first
        glyph, style = _FINDING_STYLES[finding.severity]
        console.print(Text(f"{glyph} {finding}", style=style))
        for label, text in (("expected: ", finding.expected), ("remedy:   ", finding.remedy)):
            if text:
                console.print(Text(f"    {label}{text}"))
        if group.others:
            console.print(Text(f"    {group.others_line()} (-v lists them)", style="dim"))
    for line in dict.fromkeys(problems.summary):
        console.print(Text(f"✓ {line}" if problems.exit_code == 0 else f"· {line}"))

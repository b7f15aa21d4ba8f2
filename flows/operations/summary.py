"""Print the last lines of a run: the final table, the outcome, what to try, and the location of the results.

A refused run ends with its reasons, the proposed remedy and the next command::

    refused: demo is not released
      reverse lost 12.5 points against reverser, at least 9.9; max_drop is 3
      to try: …

The score table uses the widest of three forms that fits the terminal. Numbers, names and verdicts are never cut or
wrapped. From the widest form to the narrowest:

1. a line per task, a column per model;
2. only the reference of each guard and the merge; the report has all models;
3. the same, with the names of task and reference on a line of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mergegate.flows.candidates import has_searchable_scale
from mergegate.flows.operations import command_line
from mergegate.flows.operations.console import OUTCOME_STYLES, print_table, short_path
from mergegate.flows.outcome import RunOutcome
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.release.publish import KEYLESS_SIGNATURE, SIGNATURE
from mergegate.tasks.release.report import (
    DECISION_COLUMNS,
    VARIANT_COLUMNS,
    Row,
    ScoreTable,
    SweepContent,
    costs,
    cut_off_answers,
    final_table,
    gate_notes,
    regenerated_answers,
    search_effort,
    soup_table,
    sweep_outcome,
    sweep_sentence,
    sweep_table,
    sweep_title,
    thinking_shares,
    variant_refusals,
    variant_rows,
)

# Options that check the signature in each file of a release.
_CHECKS = {SIGNATURE: "--key release.pub", KEYLESS_SIGNATURE: "--identity ID --issuer URL"}
_LABEL = 9  # columns of 'release', 'report' and 'next'
_SWEEP_STYLES: dict[Outcome, str] = {"pass": "bold green", "inconclusive": "bold yellow", "fail": "bold red"}


def outcome_json(outcome: RunOutcome) -> dict[str, Any]:
    """Return the outcome as the JSON object that commands print, with a status, a message and findings."""
    findings = [asdict(outcome.stopped_by)] if outcome.stopped_by else []
    return {**outcome.model_dump(mode="json"), "message": outcome.text, "findings": findings}


def print_outcome(console: Console, outcome: RunOutcome, as_json: bool, profile: Path | None = None) -> None:
    """Print the outcome of a run as JSON or for users. With ``profile``, users also see the next command to run."""
    if as_json:
        print(json.dumps(outcome_json(outcome), indent=1))
        return
    print_summary(console, outcome)
    if outcome.status == "interrupted":
        _print_below(console, command_line.get(), "next")
        return
    if profile is None:
        return
    if outcome.status in ("released", "nothing new") and outcome.location is not None:
        options = [text for name, text in _CHECKS.items() if Path(outcome.location, name).is_file()]
        command = " ".join(("mergegate verify", short_path(outcome.location), *options))
    elif outcome.status == "passed":
        command = f"mergegate run {profile} also publishes it, if the profile has 'publish'"
    elif outcome.status == "refused" and outcome.content is not None:
        command = f"mergegate open {outcome.content.name} shows the report"
        decides_by_documents = outcome.to_try is not None and outcome.to_try.kind == "profile"
        if outcome.content.scoring and not decides_by_documents and has_searchable_scale(outcome.content.recipe):
            _print_below(console, f"mergegate tune {profile} searches for the best scale of this merge", "next")
    else:
        command = f"mergegate check {profile}"
    _print_below(console, command, "next")


def print_summary(console: Console, outcome: RunOutcome) -> None:
    """Print the evidence as tables, then the outcome. A sweep starts with the results of its search."""
    if outcome.sweep is not None:
        console.print()
        # If nothing was released, the message is already the sweep's own verdict.
        for piece in sweep_summary(outcome.sweep, with_verdict=outcome.content is not None):
            console.print(piece, soft_wrap=False)
    if outcome.content is not None:
        if (scores := final_table(outcome.content)).rows:  # none if the merge was refused without an evaluation
            console.print()
            print_scores(console, scores)
        for sentence in (*thinking_shares(outcome.content), *regenerated_answers(outcome.content)):
            console.print(Text(sentence, style="dim"), soft_wrap=not console.is_terminal)
        for note in gate_notes(outcome.content.verdict):
            console.print(Text(f"note: {note}", style="dim"), soft_wrap=not console.is_terminal)
        for warning in cut_off_answers(outcome.content):
            console.print(Text(f"! {warning}", style="yellow"), soft_wrap=not console.is_terminal)
        if (cost_table := costs(outcome.content)).rows:
            columns = ("served", *map(str.lower, cost_table.columns), "")
            empty = ("",) * len(cost_table.columns)
            rows = [
                (row.name, *(row.cells or empty), f"not measured: {row.problem}" if row.problem else row.occasion)
                for row in cost_table.rows
            ]
            console.print()
            print_table(console, columns, rows, numbers=True)
            console.print(Text(f"measured {cost_table.occasion}", style="dim"))
        if variants := variant_rows(outcome.content):
            console.print()
            print_table(console, VARIANT_COLUMNS, [row.cells for row in variants], numbers=True)
            for sentence in variant_refusals(outcome.content):
                console.print(Text(sentence, style="dim"), soft_wrap=not console.is_terminal)
        for section in outcome.content.sections:  # verdicts without a drawing of their own
            console.print()
            console.print(Text(section.title, style="bold"))
            for sentence in section.sentences:
                console.print(Text(f"  {sentence}"))
            if section.rows:
                print_table(console, section.columns, section.rows, numbers=False)
    console.print()
    first, *details = outcome.message.splitlines()
    if f" {outcome.status}" not in f" {first}":  # the same word as in history, report and Prefect
        first = f"{outcome.status}: {first}"
    style = "bold green" if outcome.exit_code == 0 else "bold red"
    console.print(Text(first, style=style), soft_wrap=not console.is_terminal)
    for line in (*details, *outcome.reasons, *outcome.fix):
        _print_below(console, line.strip())
    if (remedy := outcome.to_try) is not None:
        for line in (f"to try: {remedy.reason}", f"{remedy.instruction()}:"):
            _print_below(console, line)
        # It starts in the first column, so that it can be pasted.
        console.print(Text(remedy.block(), style="bold"), no_wrap=True)
    result = "recipe" if outcome.sweep is not None and outcome.status == "passed" else "release"
    for label, location in ((result, outcome.location), ("report", outcome.report)):
        if location is not None:
            console.print(Text(f"  {label:<{_LABEL}}", style="dim"), Text(short_path(location)), sep="")
        if label == result:
            for published in outcome.variants:
                place = f"{short_path(published.location)} ({', '.join(published.types)})"
                console.print(Text(f"  {'variants':<{_LABEL}}", style="dim"), Text(place), sep="")


def _print_below(console: Console, line: str, label: str = "") -> None:
    """Print an indented line. In a log it stays in one piece, on a terminal a long one wraps below its beginning."""
    margin = "  " + (f"{label:<{_LABEL}}" if label else "")
    if not console.is_terminal:
        console.print(Text.assemble((margin, "dim"), line), soft_wrap=True)
        return
    grid = Table.grid()
    grid.add_column(width=len(margin), no_wrap=True)
    grid.add_column()
    grid.add_row(Text(margin, style="dim"), Text(line))
    console.print(grid, soft_wrap=False)


def sweep_summary(content: SweepContent, *, with_verdict: bool = True) -> Iterator[RenderableType]:
    """Yield a table per objective, that of a soup, the verdict with its reason (if ``with_verdict``), the effort."""
    outcome = sweep_outcome(content)
    for drawn in (*(sweep_table(content, index) for index in range(len(content.objectives))), soup_table(content)):
        if not drawn.rows:
            continue
        yield Text(drawn.title, style="dim")
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        last = len(drawn.columns) - 1
        for position, column in enumerate(drawn.columns):
            # Names may wrap, so that numbers are complete on a narrow terminal.
            is_text = position in (0, last)
            table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
        for row in drawn.rows:
            *cells, verdict = row.cells
            style, color = ("", "dim") if row.outcome is None else ("bold", _SWEEP_STYLES[row.outcome])
            table.add_row(*(Text(cell, style=style) for cell in cells), Text(verdict, style=color))
        yield table
        yield Text()
    if with_verdict:
        yield Text(f"{content.name}: {sweep_title(content).lower()}", style=_SWEEP_STYLES[outcome])
        yield Padding(Text(sweep_sentence(content)), (0, 0, 0, 2))
    yield Padding(Text(search_effort(content), style="dim"), (0, 0, 0, 2 if with_verdict else 0))


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

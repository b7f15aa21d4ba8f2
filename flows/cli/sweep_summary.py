"""Print the last lines of a sweep: recipes with their two scores, the verdict and the effort."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mergegate.tasks.report import SweepContent, search_effort, sweep_outcome, sweep_sentence, sweep_table, sweep_title
from mergegate.tasks.stage import Outcome

_STYLES: dict[Outcome, str] = {"pass": "bold green", "inconclusive": "bold yellow", "fail": "bold red"}


def sweep_summary(content: SweepContent, *, with_verdict: bool = True) -> Iterator[RenderableType]:
    """Yield a table for each objective, the verdict with its reason, and the effort.

    Args:
        with_verdict: Whether to include the verdict, not only its basis.
    """
    outcome = sweep_outcome(content)
    for objective in range(len(content.objectives)):
        drawn = sweep_table(content, objective)
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
            style = "bold" if row.outcome is not None else ""
            colour = _STYLES[row.outcome] if row.outcome is not None else "dim"
            table.add_row(*(Text(cell, style=style) for cell in cells), Text(verdict, style=colour))
        yield table
        yield Text()
    if with_verdict:
        yield Text(f"{content.name}: {sweep_title(content).lower()}", style=_STYLES[outcome])
        yield Padding(Text(sweep_sentence(content)), (0, 0, 0, 2))
    yield Padding(Text(search_effort(content), style="dim"), (0, 0, 0, 2 if with_verdict else 0))

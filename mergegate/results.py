"""Define the results of runs and merges in the Python API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from mergegate.flows.operations.console import printed_text, short_path
from mergegate.flows.operations.progress import stage_lines
from mergegate.flows.operations.summary import outcome_json, print_summary
from mergegate.flows.outcome import RunOutcome
from mergegate.merge_core.errors import Finding, Status
from mergegate.merge_core.wording import format_bytes, format_duration
from mergegate.tasks.base.stage import Outcome, StageEnd
from mergegate.tasks.quality.gate import GuardVerdict
from mergegate.tasks.quality.variants import VariantVerdict
from mergegate.tasks.release.explain import Remedy
from mergegate.tasks.release.report import final_table

# Colors that are readable on the light and on the dark background of a notebook.
_COLORS: Mapping[Outcome | None, str] = {
    "pass": "#2a9d4a",
    "inconclusive": "#c77d0a",
    "fail": "#e0423d",
    None: "inherit",
}
_CELL = "text-align:left;padding:0.1em 0.8em 0.1em 0;vertical-align:top"


@dataclass(frozen=True)
class RunResult:
    """How a run, a comparison, a gate decision or a sweep ended.

    A refusal is a result, so that a notebook can look at its evidence. Invalid input raises
    :class:`mergegate.InvalidInput` instead. In a notebook, the result shows a table of its stages and guards. As text,
    it is the summary that the command line prints.

    Attributes:
        outcome: Complete record of the run with all evidence.

    Example:
        >>> result = mergegate.run("profiles/demo.yaml", progress=False)
        >>> result.verdict, result.passed
        ('pass', True)
        >>> [(guard.task, guard.outcome, guard.max_drop) for guard in result.guards]
        [('copy', 'pass', 3.0), ('reverse', 'pass', 3.0), ('shift', 'pass', 3.0)]
    """

    outcome: RunOutcome = field(repr=False)

    @property
    def status(self) -> Status:
        """How the run ended: ``released``, ``nothing new``, ``passed`` or ``refused``.

        ``passed`` is a merge that may be released, if the profile has no target or ``publish`` is false.
        """
        return self.outcome.status

    @property
    def passed(self) -> bool:
        """Whether the run was not refused."""
        return self.outcome.exit_code == 0

    @property
    def verdict(self) -> Outcome | None:
        """Verdict of the gate and of all later stages: ``pass``, ``fail`` or ``inconclusive``.

        None if the run ended before the gate, or if there was nothing new.
        """
        return self.outcome.content.verdict.outcome if self.outcome.content else None

    @property
    def message(self) -> str:
        """One sentence that says how the run ended."""
        return self.outcome.message

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the run was refused, one sentence each, most severe first."""
        return self.outcome.reasons

    @property
    def finding(self) -> Finding | None:
        """Finding of the check that stopped the run before the gate, with its remedy. None if no check stopped it."""
        return self.outcome.stopped_by

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """Changes of the recipe that may help after a refusal, the one with the strongest reason first."""
        content = self.outcome.content
        proposed = content.explanation.remedies if content and content.explanation else ()
        first = self.outcome.to_try
        return (first, *(remedy for remedy in proposed if remedy != first)) if first else ()

    @property
    def guards(self) -> tuple[GuardVerdict, ...]:
        """Verdict of each guard with its scores, its drop in points, and its bounds. Empty before the gate."""
        return self.outcome.content.verdict.guards if self.outcome.content else ()

    @property
    def variants(self) -> tuple[VariantVerdict, ...]:
        """Verdict on each quantized variant, in the profile's order. Empty unless the merge passed."""
        return self.outcome.content.variants if self.outcome.content else ()

    @property
    def stages(self) -> tuple[StageEnd, ...]:
        """Stages of the run in the order in which they ended: name, subject, status, seconds and summary."""
        return self.outcome.stages

    @property
    def version(self) -> str | None:
        """Version of the release. None if nothing is released."""
        return self.outcome.version

    @property
    def location(self) -> Path | str | None:
        """Directory or URL of the release, or the recipe of a sweep that was not released."""
        return self.outcome.location

    @property
    def report(self) -> Path | None:
        """HTML page about the run. None if it has no page, as after :func:`mergegate.gate`."""
        return self.outcome.report

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data: the JSON object that the command prints with ``--json``."""
        return outcome_json(self.outcome)

    def __str__(self) -> str:
        return printed_text(lambda console: print_summary(console, self.outcome))

    def __repr__(self) -> str:
        return f"RunResult(status={self.status!r}, verdict={self.verdict!r}, message={self.message!r})"

    def _repr_html_(self) -> str:
        """Return the tables that a notebook shows: stages, then guards, then the outcome."""
        color = _COLORS["pass" if self.passed else "fail"]
        lines = [f'<p><strong style="color:{color}">{escape(self.status)}</strong>: {escape(self.message)}</p>']
        lines += [f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in self.reasons)}</ul>"] * bool(self.reasons)
        if self.finding:
            lines += [f"<p>{escape(line)}</p>" for line in self.outcome.fix]
        if self.stages:
            rows: list[tuple[Sequence[str], Outcome | None]] = [
                ((stage, status, text, format_duration(seconds)), "fail" if status in ("refused", "failed") else None)
                for stage, status, text, seconds in stage_lines(self.stages)
            ]
            lines.append(_html_table(("stage", "status", "result", "time"), rows, colored=1))
        if self.outcome.content:
            scores = final_table(self.outcome.content)
            lines.append(_html_table(scores.columns, [(row.cells, row.outcome) for row in scores.rows], colored=-1))
        for remedy in self.remedies:
            lines.append(f"<p>to try: <code>{escape(remedy.text())}</code>: {escape(remedy.reason)}</p>")
        for label, location in (("release", self.location), ("report", self.report)):
            if location is not None:
                lines.append(f"<p>{label}: <code>{escape(short_path(location))}</code></p>")
        return f'<div class="mergegate-result">{"".join(lines)}</div>'


@dataclass(frozen=True)
class MergeResult:
    """A merged checkpoint or adapter on the disk.

    Attributes:
        output: Directory of the merge.
        method: Name of the merge method.
        new: False if the directory already contained this merge.
        seconds: Duration of the merge. None for an adapter.
        tensors: Number of merged tensors. None for an adapter.
        bytes_written: Size of the weights in bytes. None for an adapter.
        files: sha256 of each file by name. Empty for an adapter.
        findings: Warnings about the result.
        error: Share of the change that an adapter does not represent. None for a checkpoint.
    """

    output: Path
    method: str
    new: bool = True
    seconds: float | None = None
    tensors: int | None = None
    bytes_written: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    error: float | None = None

    def __str__(self) -> str:
        if not self.new:
            return f"nothing new: {self.output} is the merge of this recipe and these parents, and is unchanged"
        if self.bytes_written is None or self.seconds is None:
            return f"{self.output}: an adapter; {self.error or 0.0:.2%} of the change is left out"
        size = format_bytes(self.bytes_written)
        return f"{self.output}: {self.tensors} tensors, {size}, in {self.seconds:.1f} s"


def _html_table(columns: Sequence[str], rows: Sequence[tuple[Sequence[str], Outcome | None]], *, colored: int) -> str:
    """Return an HTML table. The column with the index ``colored`` shows the color of each row's outcome."""
    head = "".join(f'<th style="{_CELL}">{escape(column)}</th>' for column in columns)
    body = ""
    for cells, outcome in rows:
        styles = [_CELL] * len(cells)
        styles[colored] += f";color:{_COLORS[outcome]}"
        body += "<tr>" + "".join(
            f'<td style="{style}">{escape(cell.removesuffix(" *"))}</td>'
            for style, cell in zip(styles, cells, strict=True)
        )
        body += "</tr>"
    return f'<table style="margin-bottom:0.8em"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

"""Build the table of serving costs.

The merge is listed below its parents. Each row names the day and the machine of its measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mergegate.tasks.report.content import ReportContent
from mergegate.tasks.serve import ServingCost

_COLUMNS: tuple[tuple[str, Callable[[ServingCost], str]], ...] = (
    ("Ready after", lambda measured: measured.ready),
    ("First token", lambda measured: measured.first_token),
    ("Tokens/s", lambda measured: measured.throughput.removesuffix(" tokens/s")),
    ("Memory", lambda measured: measured.memory),
    ("GPU memory", lambda measured: measured.gpu_memory),
)


@dataclass(frozen=True)
class Cost:
    """Serving cost of one model."""

    name: str
    cells: tuple[str, ...]  # one per column; empty if not measured
    occasion: str  # '2026-11-20, 2 cores'; empty if it equals the merge's
    problem: str
    is_merge: bool


@dataclass(frozen=True)
class CostTable:
    """Table of serving costs, ready to be drawn. It has no rows if nothing was measured."""

    columns: tuple[str, ...]
    rows: tuple[Cost, ...]
    occasion: str  # day and machine of the merge's measurement
    how: str


def costs(content: ReportContent) -> CostTable:
    """Return one row per served model, without columns that are empty for all models."""
    served = content.serving
    if not any(model.measured.quantities() for model in served):
        return CostTable((), (), "", "")
    columns = [(name, cell) for name, cell in _COLUMNS if any(cell(model.measured) for model in served)]
    occasion = served[-1].measured.occasion
    rows = tuple(
        Cost(
            name=model.name,
            cells=tuple(cell(model.measured) for _, cell in columns),
            occasion="" if model.measured.occasion == occasion else model.measured.occasion,
            problem=model.problem,
            is_merge=model is served[-1],
        )
        for model in served
    )
    names = tuple(name for name, _ in columns)
    return CostTable(names, rows, occasion, _measurement_note(names))


def _measurement_note(columns: tuple[str, ...]) -> str:
    parts = []
    if "Tokens/s" in columns:
        parts.append("One request at a time, after warming up; the quickest of three.")
    if "Memory" in columns:
        parts.append("Memory is the peak of all processes of the server together, without files that are only mapped.")
    return " ".join(parts)

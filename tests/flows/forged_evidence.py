"""Forge the evidence in a copy of a release. The digests show each change, and so does the recomputed verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mergegate.tasks.gate.verdict_record import EVIDENCE_RECORD, LIKELIHOODS, OUTCOMES
from mergegate.tasks.publish.content import variant_evidence

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Evidence:
    """Evidence of one verdict in a release.

    ``model`` is the judged model: 'merge', or the type of a variant.
    """

    release: Path
    model: str = "merge"

    def path(self, name: str) -> Path:
        return self.release / (name if self.model == "merge" else variant_evidence(name, self.model))

    def edit_table(self, name: str, change: Callable[[Columns], object]) -> None:
        """Change the columns of a table."""
        with pq.ParquetFile(self.path(name)) as file:
            table = file.read()
        columns = table.to_pydict()
        change(columns)
        pq.write_table(pa.table(columns, schema=table.schema), self.path(name))

    def edit_record(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the recorded inputs and verdict of the gate."""
        record = json.loads(self.path(EVIDENCE_RECORD).read_text())
        change(record)
        self.path(EVIDENCE_RECORD).write_text(json.dumps(record))

    def flip_outcome(self, model: str, task: str = "reverse", at: int = 0) -> None:
        """Flip one outcome of a model on a task."""

        def change(columns: Columns) -> None:
            row = row_of(columns, model, task, at)
            columns["outcome"][row] = 1 - columns["outcome"][row]

        self.edit_table(OUTCOMES, change)


def row_of(columns: Columns, model: str, task: str = "reverse", at: int = 0) -> int:
    """Return the index of a row of a model on a task."""
    rows = range(len(columns["model"]))
    return [row for row in rows if (columns["model"][row], columns["task"][row]) == (model, task)][at]


def flip_one_outcome(evidence: Evidence) -> None:
    evidence.flip_outcome(evidence.model)


def drop_a_document(evidence: Evidence) -> None:
    def change(columns: Columns) -> None:
        doc_id = columns["doc_id"][row_of(columns, evidence.model)]
        rows = range(len(columns["model"]))
        kept = [row for row in rows if (columns["task"][row], columns["doc_id"][row]) != ("reverse", doc_id)]
        columns.update({name: [values[row] for row in kept] for name, values in columns.items()})

    evidence.edit_table(OUTCOMES, change)


def worsen_a_likelihood(evidence: Evidence) -> None:
    def change(columns: Columns) -> None:
        columns["loglik"][columns["model"].index(evidence.model)] -= 1e-6

    evidence.edit_table(LIKELIHOODS, change)


def add_an_unknown_model(evidence: Evidence) -> None:
    evidence.edit_table(OUTCOMES, lambda columns: [values.append(values[-1]) for values in columns.values()])


def lower_the_confidence(evidence: Evidence) -> None:
    evidence.edit_record(lambda record: record["inputs"]["plan"]["rule"].update(confidence=0.9))


def raise_the_drift_limit(evidence: Evidence) -> None:
    evidence.edit_record(lambda record: record["inputs"]["limits"].update(max_increase=0.5))


def state_another_verdict(evidence: Evidence) -> None:
    evidence.edit_record(lambda record: record["verdict"].update(publishable=False))


def remove_a_guard(evidence: Evidence) -> None:
    evidence.edit_record(lambda record: record["inputs"]["guards"].pop())


def empty_a_table(evidence: Evidence) -> None:
    evidence.path(OUTCOMES).write_bytes(b"")


def truncate_the_record(evidence: Evidence) -> None:
    path = evidence.path(EVIDENCE_RECORD)
    path.write_bytes(path.read_bytes()[:-100])


FORGERIES = (
    flip_one_outcome,
    drop_a_document,
    worsen_a_likelihood,
    add_an_unknown_model,
    lower_the_confidence,
    raise_the_drift_limit,
    state_another_verdict,
    remove_a_guard,
    empty_a_table,
    truncate_the_record,
)

"""Seconds per document come from measurements if all tasks have them, and from the type of task otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gate_samples as samples
from tiny_models import write_choices

from mergegate.merge_core.files import HashMemo
from mergegate.tasks.evaluation import EvalTask, pin_task
from mergegate.tasks.evaluation.document_order import DocumentRange
from mergegate.tasks.evaluation.stage import Scores
from mergegate.tasks.evaluation.throughput import GENERATED, document_seconds
from mergegate.tasks.store import Artifact


def pinned(place: Path, name: str, kind: str) -> EvalTask:
    path = write_choices(place, name=name)
    path.write_text(path.read_text().replace("output_type: multiple_choice", f"output_type: {kind}"))
    return pin_task(path.name, place, HashMemo(place / "hashes.db"))


def took(place: Path, seconds: float | None, documents: int = 100) -> Artifact[Scores]:
    found = samples.part(place, samples.right_on([], 4))
    part = DocumentRange(first=0, last=documents)
    return dataclasses.replace(found, value=found.value.model_copy(update={"part": part, "seconds": seconds}))


def test_the_smallest_measurement_counts_in_powers_of_two(tmp_path: Path) -> None:
    slow, fast = pinned(tmp_path, "slow", "generate_until"), pinned(tmp_path, "fast", "multiple_choice")
    known = {
        "slow": [took(tmp_path / "1", 900.0), took(tmp_path / "2", 310.0), took(tmp_path / "3", None)],
        "fast": [took(tmp_path / "4", 24.0)],
    }
    assert document_seconds((slow, fast), known) == {"slow": 4.0, "fast": 0.25}
    noise = known | {"slow": [took(tmp_path / "5", 420.0)]}  # another run
    assert document_seconds((slow, fast), noise) == document_seconds((slow, fast), known)


def test_measured_and_guessed_are_not_compared(tmp_path: Path) -> None:
    slow, fast = pinned(tmp_path, "slow", "generate_until"), pinned(tmp_path, "fast", "multiple_choice")
    shipped = EvalTask(name="arc_easy", digest="0" * 64, definition=None)
    guess = {"slow": GENERATED, "fast": 1.0, "arc_easy": 1.0}
    assert document_seconds((slow, fast, shipped), {}) == guess
    assert document_seconds((slow, fast, shipped), {"slow": [took(tmp_path / "1", 900.0)]}) == guess

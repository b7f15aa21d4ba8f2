"""Run a reader of calibration texts as the stages do, with a directory and a journal of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mergegate.merge_core.files import JournalLocation
from mergegate.merge_core.recipe import CalibrationReading
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.merge.calibration import CalibrationJob
from mergegate.tasks.perplexity import HeldOutText

R = TypeVar("R")


def run_reader(
    reader: Callable[[CalibrationJob, Callable[[int, int], None]], R],
    directory: Path,
    text: HeldOutText,
    out: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **reading: Any,
) -> R:
    """Read ``text`` with the model in ``directory`` in float32 on the CPU, and store the results in ``out``."""
    out.mkdir(exist_ok=True)
    model = Model(name=directory.name, digest=str(directory), directory=directory)
    journal = JournalLocation(out.parent / f"{out.name}.journal", str(directory))
    return reader(
        CalibrationJob(model, text, CalibrationReading(**reading), "float32", "cpu", out, journal), on_progress
    )

"""Measure statistics of a model on its calibration text, for merge methods that need them.

The stage ``statistics`` measures the inputs of each matrix, and the stage ``importance`` measures how much each element
matters to the output. Each pair of model and text is measured once and cached by content. The results are then added to
the recipe::

    recipe = with_statistics(recipe, find=lambda ref: pinned[ref])      # unchanged if there is no text to read
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mergegate.merge_core import Recipe
from mergegate.merge_core.architecture import dtype_in
from mergegate.merge_core.checkpoint import open_importance, open_moments
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import JOURNAL, HashMemo, JournalLocation, keep_only_journal
from mergegate.merge_core.parsing import read_json
from mergegate.merge_core.recipe import CalibrationReading, InputMeasurements, expand_user_path
from mergegate.tasks.checkpoints import Model, TellProgress, call_model_process, files_fingerprint, writable_directory
from mergegate.tasks.merge.calibration import CalibrationJob
from mergegate.tasks.merge.gradient_statistics import ImportanceStatistics, read_gradients
from mergegate.tasks.merge.input_statistics import InputStatistics, read_inputs
from mergegate.tasks.perplexity import HeldOutText, TextSetting, pin_text
from mergegate.tasks.stage import Runtime, advance, formats_without_units, runtime, stage, store
from mergegate.tasks.store import Artifact

_Statistics = TypeVar("_Statistics", InputStatistics, ImportanceStatistics)
Measure: TypeAlias = Callable[[Model, HeldOutText, CalibrationReading, str, Runtime], Artifact[Any]]


@stage("statistics", version=2, subject="model", resumable=True)
def input_statistics(
    out: Path, model: Model, text: HeldOutText, reading: CalibrationReading, dtype: str, runtime: Runtime
) -> InputStatistics:
    """Measure the inputs of each matrix of ``model`` while it reads ``text``, resuming from a killed run's journal.

    Raises:
        InvalidInput: The model cannot be loaded, cannot read the text, or computes NaN or infinity.
    """
    keep_only_journal(out)
    journal = JournalLocation(out / JOURNAL, input_statistics.key(model, text, reading, dtype, runtime))
    return _measure(read_inputs, CalibrationJob(model, text, reading, dtype, runtime.device, out, journal))


@stage("importance", version=2, subject="model", resumable=True)
def importance_statistics(
    out: Path, model: Model, text: HeldOutText, reading: CalibrationReading, dtype: str, runtime: Runtime
) -> ImportanceStatistics:
    """Measure how much each element of ``model`` matters to its predictions on ``text``, resuming a killed run.

    Raises:
        InvalidInput: The model cannot be loaded, cannot read the text, or computes NaN or infinity.
    """
    keep_only_journal(out)
    journal = JournalLocation(out / JOURNAL, importance_statistics.key(model, text, reading, dtype, runtime))
    return _measure(read_gradients, CalibrationJob(model, text, reading, dtype, runtime.device, out, journal))


def _measure(read: Callable[[CalibrationJob, TellProgress], _Statistics], job: CalibrationJob) -> _Statistics:
    """Call ``read`` in the model process, with a journal that is only reused while the model's files are the same."""
    journal = JournalLocation(job.journal.path, job.journal.key + files_fingerprint([job.model]))
    with writable_directory(job.out) as out:
        return call_model_process(
            read,
            [replace(job, journal=journal, out=out)],
            location=f"statistics of {job.model.name}",
            models=[job.model],
            on_progress=lambda done, total: advance(done, total, "texts"),
        )


def calibration_stage_name(recipe: Recipe) -> str | None:
    """Return the name of the stage that reads the texts of one recipe document, or None if it measures nothing."""
    if not recipe.needs_statistics:
        return None
    return importance_statistics.name if _wants_importance(recipe) else input_statistics.name


def _wants_importance(recipe: Recipe) -> bool:
    return recipe.method.traits.reads_text == "importance"


def pin_calibration_texts(recipe: Recipe, hashes: HashMemo) -> Iterator[tuple[str, HeldOutText]]:
    """Yield the reference of each model in one recipe document that has a calibration text, with the pinned text.

    A relative path is searched in the recipe's directory first, then in the working directory.

    Raises:
        InvalidInput: A text does not exist, or does not have the format that the recipe declares.
    """
    for ref, text_path in recipe.texts.items():
        file = expand_user_path(text_path)
        candidates = [directory / file for directory in (recipe.directory, Path.cwd()) if directory is not None]
        path = next((candidate for candidate in candidates if candidate.is_file()), candidates[0]).absolute()
        location, setting = f"{recipe.location}: text of {ref}: {text_path}", "statistics.field"
        field = recipe.reading.field
        pinned = pin_text(path, field, hashes, TextSetting(location, setting, "recipe"), conversations=True)
        yield str(ref), pinned


def with_statistics(
    recipe: Recipe, find: Callable[[str], Model], call: Callable[[Any], Measure] = lambda stage: stage.build
) -> Recipe:
    """Return ``recipe`` with the statistics of its models on their texts, in all of its documents.

    ``find`` returns the pinned model for a reference, with its adapter applied so that any library can load it.
    ``call`` turns a stage into the function that runs it, by default without Prefect.

    Raises:
        InvalidInput: A text does not exist, or its model cannot read it.
    """

    def complete(document: Recipe) -> Recipe:
        if not document.needs_statistics or document.measured is not None:
            return document
        wants_importance = _wants_importance(document)
        measure = call(importance_statistics if wants_importance else input_statistics)
        current_runtime, measured = runtime(), {}
        for ref, text in tuple(pin_calibration_texts(document, store().hashes)):
            model = find(ref)
            # Run the model in its own format, or in float32 if the machine has no units for that format.
            own_dtype = ""
            with suppress(MergegateError):  # Loading the model reports the problem.
                own_dtype = dtype_in(read_json(model.directory / "config.json"))
            dtype = "float32" if own_dtype in formats_without_units(current_runtime.device) else "auto"
            artifact = measure(model, text, document.reading, dtype, current_runtime)
            opened: dict[str, Any] = (
                {"importance": open_importance(artifact.directory)}
                if wants_importance
                else {"moments": open_moments(artifact.directory)}
            )
            measured[ref] = InputMeasurements(artifact.digest, text.sha256, **opened)
        return replace(document, measured=measured)

    return recipe.map_documents(complete)

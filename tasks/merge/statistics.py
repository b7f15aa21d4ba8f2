"""What a model shows on a text of its own, for methods that ask: the stages ``statistics`` (what flows into its
matrices) and ``importance`` (how much each of its elements matters).

Measured once for each model and text, kept by content; then a recipe has it in the place of its texts::

    recipe = with_statistics(recipe, find=lambda ref: pinned[ref])      # the same recipe where no text is to be read
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from mergegate.merge_core import Recipe
from mergegate.merge_core.architecture import dtype_in
from mergegate.merge_core.checkpoint import FILES_OF_IMPORTANCE, FILES_OF_MOMENTS, open_importance, open_moments
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import JOURNAL, HashMemo, JournalPlace, keep_only_journal
from mergegate.merge_core.parsing import read_json
from mergegate.merge_core.recipe import CalibrationReading, InputMeasurements, expand_user_path
from mergegate.tasks.checkpoints import Model, call_model_process, files_fingerprint
from mergegate.tasks.merge.gradient_statistics import ImportanceStatistics, read_gradients
from mergegate.tasks.merge.input_statistics import InputStatistics, read_inputs
from mergegate.tasks.perplexity import HeldOutText, pin_text
from mergegate.tasks.stage import Runtime, advance, formats_without_units, runtime, stage, store
from mergegate.tasks.store import Artifact

Measure: TypeAlias = Callable[[Model, HeldOutText, CalibrationReading, str, Runtime], Artifact[Any]]


@stage("statistics", version=2, subject="model", resumable=True)
def input_statistics(
    out: Path, model: Model, text: HeldOutText, reading: CalibrationReading, dtype: str, runtime: Runtime
) -> InputStatistics:
    """What flows into each matrix of ``model`` while it reads ``text``; goes on from the journal of a killed run.

    Raises:
        InvalidInput: when the model cannot be loaded or read the text, or computes no numbers.
    """
    keep_only_journal(out, FILES_OF_MOMENTS)
    key = input_statistics.key(model, text, reading, dtype, runtime) + files_fingerprint([model])
    return call_model_process(
        read_inputs,
        (model, text, reading, dtype, runtime.device, out, JournalPlace(out / JOURNAL, key)),
        where=f"statistics of {model.name}",
        models=[model],
        on_progress=lambda done, total: advance(done, total, "texts"),
    )


@stage("importance", version=2, subject="model", resumable=True)
def importance_statistics(
    out: Path, model: Model, text: HeldOutText, reading: CalibrationReading, dtype: str, runtime: Runtime
) -> ImportanceStatistics:
    """How much each element of ``model`` matters to what it says on ``text``; goes on from the journal of a killed run.

    Raises:
        InvalidInput: when the model cannot be loaded or read the text, or computes no numbers.
    """
    keep_only_journal(out, FILES_OF_IMPORTANCE)
    key = importance_statistics.key(model, text, reading, dtype, runtime) + files_fingerprint([model])
    return call_model_process(
        read_gradients,
        (model, text, reading, dtype, runtime.device, out, JournalPlace(out / JOURNAL, key)),
        where=f"importance of {model.name}",
        models=[model],
        on_progress=lambda done, total: advance(done, total, "texts"),
    )


def calibration_stage_name(recipe: Recipe) -> str | None:
    """Name of the stage in which the models of one document of a recipe read their texts; None where they have none."""
    if not recipe.texts:
        return None
    return importance_statistics.name if _wants_importance(recipe) else input_statistics.name


def _wants_importance(recipe: Recipe) -> bool:
    return recipe.method.traits.reads_text == "importance"


def pin_calibration_texts(recipe: Recipe, hashes: HashMemo) -> Iterator[tuple[str, HeldOutText]]:
    """The texts of one document of a recipe, each with the reference of its model.

    Raises:
        InvalidInput: for a text that is not there, or is not as the recipe says.
    """
    for ref, written in recipe.texts.items():
        file = expand_user_path(written)
        places = [start / file for start in (recipe.directory, Path.cwd()) if start is not None]
        path = next((place for place in places if place.is_file()), places[0]).absolute()
        where, named = f"{recipe.where}: text of {ref}: {written}", "statistics.field"
        field = recipe.reading.field
        pinned = pin_text(path, field, hashes, where=where, relative_to="recipe", named=named, conversations=True)
        yield str(ref), pinned


def with_statistics(
    recipe: Recipe, find: Callable[[str], Model], call: Callable[[Any], Measure] = lambda stage: stage.build
) -> Recipe:
    """``recipe`` with what its models show on their texts, in every document of it.

    Args:
        find: The pinned model of a reference, which any library can load.
        call: How a stage is asked; absent: without Prefect.

    Raises:
        InvalidInput: when a text is not there, or its model cannot read it.
    """
    return recipe.map_documents(lambda document: _with_own(document, find, call))


def _with_own(recipe: Recipe, find: Callable[[str], Model], call: Callable[[Any], Measure]) -> Recipe:
    if not recipe.texts or recipe.measured is not None:
        return recipe
    matters = _wants_importance(recipe)
    measure = call(importance_statistics if matters else input_statistics)
    here, measured = runtime(), {}
    for ref, text in tuple(pin_calibration_texts(recipe, store().hashes)):
        model = find(ref)
        made = measure(model, text, recipe.reading, _dtype(model, here), here)
        if matters:
            measured[ref] = InputMeasurements(made.digest, text.sha256, importance=open_importance(made.directory))
        else:
            measured[ref] = InputMeasurements(made.digest, text.sha256, moments=open_moments(made.directory))
    return replace(recipe, measured=measured)


def _dtype(model: Model, here: Runtime) -> str:
    """The format that the model is computed in: its own, unless this machine could only convert it."""
    stored = ""
    with suppress(MergegateError):  # whoever loads it says what is wrong with it
        stored = dtype_in(read_json(model.directory / "config.json"))
    return "float32" if stored in formats_without_units(here.device) else "auto"

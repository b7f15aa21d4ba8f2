"""Refit the routers of a merged mixture of experts to the routing of its parents (HARC).

The recipe is first merged as if it had no ``router_repair``. The stage ``routers`` then runs this merge on the text of
each parent, and computes new routers (``router_fitting.py``). They replace the merged ones in the plan::

    recipe = with_new_routers(recipe, lambda ref: pinned[ref], numerics)      # unchanged without router_repair

Only the merge runs. The parents contribute their routers, which this process reads from their checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core import Recipe
from mergegate.merge_core.architecture import dtype_in, rename_to_layout
from mergegate.merge_core.architecture.experts import find_routers, match_experts, read_routers, split_experts
from mergegate.merge_core.checkpoint import read_header
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import JOURNAL, JournalLocation, keep_only_journal
from mergegate.merge_core.parsing import read_json
from mergegate.merge_core.recipe import CalibrationReading, RepairedRouters, RouterRepair
from mergegate.tasks.checkpoints import (
    Model,
    PinnedCheckpoint,
    PinnedRecipe,
    call_model_process,
    files_fingerprint,
    writable_directory,
)
from mergegate.tasks.merge.calibration import CalibrationJob
from mergegate.tasks.merge.router_fitting import FILES_OF_ROUTERS, ParentRouters, RouterRepairSummary, repair_routers
from mergegate.tasks.merge.stage import Numerics, merge, merged_model
from mergegate.tasks.merge.statistics import pin_calibration_texts
from mergegate.tasks.perplexity import HeldOutText
from mergegate.tasks.stage import Runtime, advance, formats_without_units, runtime, stage, store


class RepairRequest(NamedTuple):
    """Text of each parent, and the settings for reading them and for the fit."""

    texts: tuple[tuple[PinnedCheckpoint, HeldOutText], ...]
    reading: CalibrationReading
    settings: RouterRepair


@stage("routers", version=1, subject="model", resumable=True)
def new_routers(
    out: Path, model: Model, pinned: PinnedRecipe, request: RepairRequest, dtype: str, runtime: Runtime
) -> RouterRepairSummary:
    """Compute new routers for ``model``, the merge of the recipe ``pinned``, resuming from a killed run's journal.

    Raises:
        InvalidInput: The merge cannot be loaded or cannot read a text, a text is too short, or a router cannot be
            observed or computes NaN or infinity.
    """
    keep_only_journal(out)
    matched = match_experts(pinned.recipe, {parent.ref: parent.open() for parent in pinned.parents})
    donor = split_experts(matched.checkpoints[str(pinned.recipe.donor)])
    parents = []
    for parent, text in request.texts:
        checkpoint = rename_to_layout(donor, split_experts(matched.checkpoints[parent.ref]))
        parents.append(ParentRouters(parent.ref, text, read_routers(find_routers(checkpoint).values())))
    key = new_routers.key(model, pinned, request, dtype, runtime) + files_fingerprint([model])
    journal = JournalLocation(out / JOURNAL, key)
    with writable_directory(out) as place:
        job = CalibrationJob(model, request.texts[0][1], request.reading, dtype, runtime.device, place, journal)
        return call_model_process(
            repair_routers,
            (job, tuple(parents), request.settings),
            location=f"routers of {model.name}",
            models=[model],
            on_progress=lambda done, total: advance(done, total, "texts"),
        )


def with_new_routers(
    recipe: Recipe,
    find: Callable[[str], PinnedCheckpoint],
    numerics: Numerics,
    call: Callable[[Any], Callable[..., Any]] = lambda stage: stage.build,
) -> Recipe:
    """Return ``recipe`` with new routers for its result, or ``recipe`` itself if it has no ``router_repair``.

    ``find`` returns the pinned model for a reference. ``call`` turns a stage into the function that runs it, by default
    without Prefect.

    Raises:
        InvalidInput: A text does not exist or cannot be used, or the merge cannot be run.
        Refused: The merge is not healthy before its routers are replaced.
    """
    if recipe.router_repair is None or recipe.repaired is not None:
        return recipe
    texts = tuple((find(ref), text) for ref, text in pin_calibration_texts(recipe, store().hashes))
    parents = tuple(find(str(reference)) for reference in recipe.references())
    plain = PinnedRecipe(replace(recipe, router_repair=None), parents)
    model = merged_model(call(merge)(plain, numerics), plain)
    # Run the merge in its own format, or in float32 if the machine has no units for that format.
    current, own_dtype = runtime(), ""
    with suppress(MergegateError):  # Loading the model reports the problem.
        own_dtype = dtype_in(read_json(model.directory / "config.json"))
    dtype = "float32" if own_dtype in formats_without_units(current.device) else "auto"
    artifact = call(new_routers)(
        model, plain, RepairRequest(texts, recipe.reading, recipe.router_repair), dtype, current
    )
    summary: RouterRepairSummary = artifact.value
    tensors = [tensor for file in sorted(artifact.directory.glob(FILES_OF_ROUTERS)) for tensor in read_header(file)]
    repaired = RepairedRouters(
        digest=artifact.digest,
        texts={parent.ref: text.sha256 for parent, text in texts},
        tensors={tensor.name: tensor for tensor in tensors},
        divergence=summary.mean("divergence"),
        agreement=summary.mean("agreement"),
        layers=len(summary.layers),
        new_layers=summary.new_layers,
    )
    return replace(recipe, repaired=repaired)

"""Merge checkpoints: read a recipe, open its checkpoints, plan the merge, and stream it to the disk.

    record = merge("ties.yaml", "out")

does everything. The steps are also available one by one::

    recipe = load_recipe(Path("ties.yaml"))
    checkpoints = {str(ref): open_checkpoint(resolve_local(ref, recipe.directory)) for ref in recipe.references()}
    planned = plan_with_findings(recipe, checkpoints)
    if not planned.blocking:
        record = merge_weights(planned.plan, Path("out"))

The modules behind these names are imported when a name is first used, so importing this package takes no time.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergegate.merge_core.checkpoint import Checkpoint, open_checkpoint
    from mergegate.merge_core.engine import EngineSettings, MergeRecord, merge_tensors, merge_weights
    from mergegate.merge_core.errors import Finding
    from mergegate.merge_core.methods import Method, Parameter, merge_methods
    from mergegate.merge_core.plan import MergePlan, PlannedMerge, plan_merge, plan_with_findings, preflight
    from mergegate.merge_core.recipe import CheckpointRef, Recipe, load_recipe, resolve_local

_HOMES = {
    "Checkpoint": "checkpoint",
    "open_checkpoint": "checkpoint",
    "MergeRecord": "engine",
    "EngineSettings": "engine",
    "merge_tensors": "engine",
    "merge_weights": "engine",
    "Finding": "errors",
    "merge_methods": "methods",
    "Method": "methods",
    "Parameter": "methods",
    "MergePlan": "plan",
    "PlannedMerge": "plan",
    "plan_merge": "plan",
    "plan_with_findings": "plan",
    "preflight": "plan",
    "Recipe": "recipe",
    "load_recipe": "recipe",
    "CheckpointRef": "recipe",
    "resolve_local": "recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def merge(
    recipe: Recipe | Path | str,
    output: Path | str,
    *,
    seed: int = 0,
    device: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
) -> MergeRecord:
    """Merge local checkpoints into the new directory ``output``.

    The directory appears when the merge is complete. After an interruption, the same call resumes the merge from
    ``<output>.partial``.

    Args:
        recipe: Recipe, or the path of its YAML file.
        output: Directory for the merged checkpoint. It must not exist.
        seed: Seed of the random masks of DARE and DELLA.
        device: ``cpu``, ``cuda`` (all GPUs), ``cuda:1``, or ``auto`` (all GPUs, or else the CPU).
        on_progress: Function called with the finished and the total output bytes, several times per second.

    Returns:
        The statistics of the merge, the sha256 of each file, and all warnings as ``findings``.

    Raises:
        InvalidInput: The recipe is invalid, a model is not a local checkpoint, the models do not fit each other, a
            weight is NaN or infinite, or ``output`` exists. Also if the recipe produces an adapter, or needs
            measurements of its models, such as calibration texts: use ``mergegate merge`` for these recipes.
        Refused: The models or the result fail a check, or another process is writing ``output``.
        ChangedInput: A file of a model changed during the merge.
        DiskUnavailable: The disk is full or fails.

    Example:
        >>> record = merge("ties.yaml", "merged")  # doctest: +SKIP
        >>> record.tensors  # doctest: +SKIP
        290
    """
    from dataclasses import replace

    from mergegate.merge_core.adapters import apply_adapter, open_adapter
    from mergegate.merge_core.architecture.experts import match_experts
    from mergegate.merge_core.checkpoint import open_checkpoint
    from mergegate.merge_core.engine import merge_weights, require_prepared, start_or_resume
    from mergegate.merge_core.errors import InvalidInput, worst_first
    from mergegate.merge_core.files import new_directory, remove_contents
    from mergegate.merge_core.plan import plan_merge, plan_with_findings
    from mergegate.merge_core.recipe import Recipe, load_recipe, parse_reference, resolve_local

    if not isinstance(recipe, Recipe):
        recipe = load_recipe(Path(recipe))
    recipe_directory = recipe.directory

    def local_directory(ref: CheckpointRef) -> Path:
        directory = resolve_local(ref, recipe_directory)
        if directory is None:
            raise InvalidInput(
                str(ref),
                found="no such directory",
                expected="a local checkpoint",
                remedy="correct the path. For a model on the Hub, download it first or use 'mergegate merge'",
            )
        return directory

    if recipe.output is not None:
        raise InvalidInput(
            recipe.location,
            found="a recipe that produces an adapter",
            expected="a recipe that produces a checkpoint",
            remedy="use 'mergegate merge'",
        )
    checkpoints = {}
    for ref in recipe.references():
        checkpoint = open_checkpoint(local_directory(ref))
        if ref.adapter is not None:
            adapter = local_directory(parse_reference(ref.adapter, str(ref)))
            checkpoint = apply_adapter(checkpoint, open_adapter(adapter))
        checkpoints[str(ref)] = checkpoint
    planned = plan_with_findings(recipe, checkpoints)
    if planned.plan is None or planned.blocking:
        raise planned.blocking[0].refusal()
    matched = match_experts(recipe, checkpoints)
    plan = plan_merge(matched.recipe, matched.checkpoints) if recipe.align_experts else planned.plan
    require_prepared(plan)
    with new_directory(Path(output), resume=True, by="merge into it") as directory:
        start_or_resume(directory, plan)
        record = merge_weights(plan, directory, seed=seed, device=device, on_progress=on_progress)
        if record.findings and record.findings[0].severity == "block":
            remove_contents(directory)
            raise record.findings[0].refusal()
    findings = (*recipe.all_findings, *planned.findings, *matched.findings, *record.findings)
    return replace(record, findings=worst_first(dict.fromkeys(findings)))


__all__ = [
    "Checkpoint",
    "CheckpointRef",
    "EngineSettings",
    "Finding",
    "MergePlan",
    "MergeRecord",
    "Method",
    "Parameter",
    "PlannedMerge",
    "Recipe",
    "load_recipe",
    "merge",
    "merge_methods",
    "merge_tensors",
    "merge_weights",
    "open_checkpoint",
    "plan_merge",
    "plan_with_findings",
    "preflight",
    "resolve_local",
]

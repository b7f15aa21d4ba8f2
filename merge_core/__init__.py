"""Merge checkpoints: read a recipe, open its checkpoints, plan the merge, and stream it to the disk.

    recipe = load_recipe(Path("ties.yaml"))
    checkpoints = {str(ref): open_checkpoint(resolve_local(ref, recipe.directory)) for ref in recipe.references()}
    planned = plan_with_findings(recipe, checkpoints)
    if not planned.blocking:
        record = merge_weights(planned.plan, Path("out"))

The modules behind these names are imported when a name is first used, so importing this package takes no time.
"""

from __future__ import annotations

from importlib import import_module
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
    "merge_methods",
    "merge_tensors",
    "merge_weights",
    "open_checkpoint",
    "plan_merge",
    "plan_with_findings",
    "preflight",
    "resolve_local",
]

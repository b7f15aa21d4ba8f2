"""Merging checkpoints: recipes, checkpoints, methods, and the engine that streams one into the other.

    recipe = load_recipe(Path("ties.yaml"))
    checkpoints = {str(ref): open_checkpoint(resolve_local(ref, recipe.directory)) for ref in recipe.references()}
    findings = preflight(recipe, checkpoints)
    record = merge(plan_merge(recipe, checkpoints), Path("out"))

Names are loaded when they are first used: importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from merge_core.checkpoint import Checkpoint, open_checkpoint
    from merge_core.compatibility import preflight
    from merge_core.engine import MergeRecord, Settings, merge
    from merge_core.findings import Finding
    from merge_core.merge_methods import methods
    from merge_core.merge_methods.contract import Method, Parameter
    from merge_core.plan import MergePlan, plan_merge
    from merge_core.recipe import Recipe, load_recipe
    from merge_core.reference import CheckpointRef, resolve_local

_HOMES = {
    "Checkpoint": "checkpoint",
    "open_checkpoint": "checkpoint",
    "MergeRecord": "engine",
    "Settings": "engine",
    "merge": "engine",
    "Finding": "findings",
    "methods": "merge_methods",
    "Method": "merge_methods.contract",
    "Parameter": "merge_methods.contract",
    "MergePlan": "plan",
    "plan_merge": "plan",
    "preflight": "compatibility",
    "Recipe": "recipe",
    "load_recipe": "recipe",
    "CheckpointRef": "reference",
    "resolve_local": "reference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Checkpoint",
    "CheckpointRef",
    "Finding",
    "MergePlan",
    "MergeRecord",
    "Method",
    "Parameter",
    "Recipe",
    "Settings",
    "load_recipe",
    "merge",
    "methods",
    "open_checkpoint",
    "plan_merge",
    "preflight",
    "resolve_local",
]

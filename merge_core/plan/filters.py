"""Filters of a recipe that name what no tensor of the plan is called: fused experts have single names in a merge.

A filter that matched a fused tensor's name would otherwise silently match nothing, and its value be that of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergegate.merge_core.architecture.experts import disk_name
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.plan.jobs import TensorJob
from mergegate.merge_core.recipe import Condition, Parameters, Recipe


def lost_filters(recipe: Recipe, jobs: Sequence[TensorJob]) -> Iterator[Finding]:
    """Filters that match names on disk, and none of the names that the merge knows."""
    filters = filtered_conditions(recipe)
    if not filters:
        return
    tensors = [item.tensor for job in jobs for item in job.inputs]
    known = {tensor.name for tensor in tensors} | {job.output.name for job in jobs}
    elsewhere = {disk_name(tensor): tensor.name for tensor in reversed(tensors) if disk_name(tensor) not in known}
    if not elsewhere:
        return
    for condition in filters:
        if any(condition.matches(name) for name in known):
            continue
        meant = next((name for disk, name in elsewhere.items() if condition.matches(disk)), None)
        if meant is not None:
            yield Finding(
                "block",
                condition.where,
                found=f"filter {condition.filter!r}, which is in the name of fused tensors only",
                expected=f"the names of single experts, such as {meant}",
                remedy="name the projection as it is called there: experts are merged one by one",
            )


def filtered_conditions(recipe: Recipe) -> tuple[Condition, ...]:
    """What one document says of some tensors only."""
    return tuple(
        condition
        for parameters in _scopes(recipe)
        for setting in parameters.settings
        for condition in setting.conditions
        if condition.filter is not None
    )


def _scopes(recipe: Recipe) -> Iterator[Parameters]:
    yield recipe.parameters
    for module in recipe.modules:
        yield module.parameters
        for cut in module.slices:
            yield cut.parameters
            for source in cut.sources:
                yield source.parameters

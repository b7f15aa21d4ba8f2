"""Find recipe filters that match no tensor of the plan because a merge addresses fused experts one by one.

Without this check, a filter for the name of a fused tensor would silently match nothing, and its value would never
apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergegate.merge_core.architecture.experts import disk_name
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.plan.jobs import TensorJob
from mergegate.merge_core.recipe import Condition, Parameters, Recipe


def lost_filters(recipe: Recipe, jobs: Sequence[TensorJob]) -> Iterator[Finding]:
    """Yield a finding for each filter that matches only names on disk, not the names that the merge uses."""
    filters = filtered_conditions(recipe)
    if not filters:
        return
    tensors = [item.tensor for job in jobs for item in job.inputs]
    names = {tensor.name for tensor in tensors} | {job.output.name for job in jobs}
    fused = {disk_name(tensor): tensor.name for tensor in reversed(tensors) if disk_name(tensor) not in names}
    if not fused:
        return
    for condition in filters:
        if any(condition.matches(name) for name in names):
            continue
        example = next((name for disk, name in fused.items() if condition.matches(disk)), None)
        if example is not None:
            yield Finding(
                "block",
                condition.location,
                found=f"filter {condition.filter!r}, which is in the name of fused tensors only",
                expected=f"the names of single experts, such as {example}",
                remedy="name the projection as it is called there: experts are merged one by one",
            )


def filtered_conditions(recipe: Recipe) -> tuple[Condition, ...]:
    """Return the conditions of one recipe document that apply to some tensors only."""
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

"""The parents of a recipe, and its plan, from headers alone: the part of a preflight that ``mergegate merge`` and
``plan`` need. Apart from ``flows.preflight``, so that they start in a second.
"""

from __future__ import annotations

from merge_core import Finding, MergePlan, Recipe, plan_merge, plan_with_findings
from tasks.checkpoints import (
    ResolvedCheckpoint,
    adapter_remarks,
    open_parent,
    require_combinable,
    resolve_all_parents,
)


def plan_recipe(recipe: Recipe) -> tuple[tuple[ResolvedCheckpoint, ...], MergePlan]:
    """The parents of a recipe, and the plan, whether or not it would be a good idea.

    Raises:
        InvalidInput: for parents that are not there, cannot be checkpoints, or of which no plan can be made.
        Refused: for parents that cannot be looked into.
    """
    (found,) = resolve_all_parents([recipe])
    return found, plan_merge(recipe, {parent.ref: open_parent(parent) for parent in found})


def clear_recipe(recipe: Recipe) -> tuple[tuple[ResolvedCheckpoint, ...], tuple[Finding, ...]]:
    """The parents of a recipe that may be merged, and what is odd about them.

    Raises:
        InvalidInput: for parents that are not there, or cannot be checkpoints.
        Refused: for parents that do not fit each other, or cannot be looked into.
    """
    (found,) = resolve_all_parents([recipe])
    require_combinable(recipe, found)
    planned = plan_with_findings(recipe, {parent.ref: open_parent(parent) for parent in found})
    findings = planned.findings
    if planned.cut_pairs:  # Asking tokenizers takes a process, and only where they differ.
        from tasks.preflight import with_shares

        findings = with_shares(planned)
    if blocking := [finding for finding in findings if finding.severity == "block"]:
        raise blocking[0].refusal()
    return found, (*findings, *adapter_remarks(found))

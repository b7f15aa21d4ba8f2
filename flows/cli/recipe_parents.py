"""The parents of a recipe, and its plan, from headers alone: the part of a preflight that ``mergegate merge`` and
``plan`` need. Apart from ``flows.preflight``, so that they start in a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core import Checkpoint, Finding, MergePlan, Recipe, plan_merge, plan_with_findings
from mergegate.merge_core.files import FileIdentity, file_identity
from mergegate.tasks.checkpoints import (
    ResolvedCheckpoint,
    adapter_findings_of_parents,
    identify_parents,
    open_parent,
    require_combinable,
    resolve_all_parents,
)
from mergegate.tasks.stage import store


def plan_recipe(recipe: Recipe) -> tuple[tuple[ResolvedCheckpoint, ...], MergePlan]:
    """The parents of a recipe, and the plan, whether or not it would be a good idea.

    Raises:
        InvalidInput: for parents that are not there, cannot be checkpoints, or of which no plan can be made.
        Refused: for parents that cannot be looked into.
    """
    (found,) = resolve_all_parents([recipe])
    return found, plan_merge(recipe, {parent.ref: open_parent(parent) for parent in found})


@dataclass(frozen=True)
class ClearedRecipe:
    """A recipe that may be merged.

    Args:
        recipe: Itself.
        found: Its parents.
        looked: What the files of the parents were before they were opened; empty where some may not be here yet.
        opened: Their headers, by reference.
        plan: What will be done.
        findings: What is odd.
        texts: What the files of the texts were that its models will read.
    """

    recipe: Recipe
    found: tuple[ResolvedCheckpoint, ...]
    looked: Mapping[Path, FileIdentity]
    opened: Mapping[str, Checkpoint]
    plan: MergePlan
    findings: tuple[Finding, ...]
    texts: Mapping[Path, FileIdentity]


def clear_recipe(recipe: Recipe) -> ClearedRecipe:
    """The parents of a recipe that may be merged, opened, with the plan and what is odd.

    Raises:
        InvalidInput: for parents that are not there, or cannot be checkpoints.
        Refused: for parents that do not fit each other, or cannot be looked into.
    """
    (found,) = resolve_all_parents([recipe])
    require_combinable(recipe, found)
    looked = {} if any(parent.snapshots for parent in found) else identify_parents(found)
    opened = {parent.ref: open_parent(parent) for parent in found}
    planned = plan_with_findings(recipe, opened)
    findings = planned.findings
    if planned.tokenizer_pairs:  # Asking tokenizers takes a process, and only where they differ.
        from mergegate.tasks.preflight import add_segmentation_shares

        findings = add_segmentation_shares(planned)
    if blocking := [finding for finding in findings if finding.severity == "block"]:
        raise blocking[0].refusal()
    assert planned.plan is not None  # else something blocks
    texts = _texts(recipe)
    findings = (*recipe.all_findings, *findings, *adapter_findings_of_parents(found))
    return ClearedRecipe(recipe, found, looked, opened, planned.plan, findings, texts)


def _texts(recipe: Recipe) -> dict[Path, FileIdentity]:
    documents = [document for document in (*recipe.steps, recipe) if document.texts]
    if not documents:
        return {}
    from mergegate.tasks.merge import pin_calibration_texts

    pinned = [text for document in documents for _, text in pin_calibration_texts(document, store().hashes)]
    return {text.path: file_identity(text.path) for text in pinned}

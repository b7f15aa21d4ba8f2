"""Resolve the parents of a recipe and plan it from headers alone, for ``mergegate merge`` and ``plan``.

These commands do not use ``flows.preflight``, so that they start within a second.
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
    """Return the parents of a recipe and its plan, without checking that they fit each other.

    Raises:
        InvalidInput: Parents do not exist, are not checkpoints, or cannot be planned.
        Refused: Parents are not accessible.
    """
    (parents,) = resolve_all_parents([recipe])
    return parents, plan_merge(recipe, {parent.ref: open_parent(parent) for parent in parents})


@dataclass(frozen=True)
class ClearedRecipe:
    """A recipe that may be merged, with its parents, their headers (``opened``), the plan and warnings (``findings``).

    ``identities`` identifies the parents' files as they were before mergegate opened them. It is empty if a parent is
    on the Hub. ``texts`` identifies the files with calibration texts.
    """

    recipe: Recipe
    parents: tuple[ResolvedCheckpoint, ...]
    identities: Mapping[Path, FileIdentity]
    opened: Mapping[str, Checkpoint]
    plan: MergePlan
    findings: tuple[Finding, ...]
    texts: Mapping[Path, FileIdentity]


def clear_recipe(recipe: Recipe) -> ClearedRecipe:
    """Resolve, open and plan the parents of a recipe, and check that they fit each other.

    Raises:
        InvalidInput: Parents do not exist or are not checkpoints.
        Refused: Parents do not fit each other or are not accessible.
    """
    (parents,) = resolve_all_parents([recipe])
    require_combinable(recipe, parents)
    identities = {} if any(parent.snapshots for parent in parents) else identify_parents(parents)
    opened = {parent.ref: open_parent(parent) for parent in parents}
    planned = plan_with_findings(recipe, opened)
    findings = planned.findings
    if planned.tokenizer_pairs:  # Comparing tokenizers takes a process, so do it only if they differ.
        from mergegate.tasks.preflight import add_segmentation_shares

        findings = add_segmentation_shares(planned)
    if blocking := [finding for finding in findings if finding.severity == "block"]:
        raise blocking[0].refusal()
    assert planned.plan is not None  # otherwise there is a blocking finding
    texts = _texts(recipe)
    findings = (*recipe.all_findings, *findings, *adapter_findings_of_parents(parents, opened))
    return ClearedRecipe(recipe, parents, identities, opened, planned.plan, findings, texts)


def _texts(recipe: Recipe) -> dict[Path, FileIdentity]:
    documents = [document for document in (*recipe.steps, recipe) if document.texts]
    if not documents:
        return {}
    from mergegate.tasks.merge import pin_calibration_texts

    pinned = [text for document in documents for _, text in pin_calibration_texts(document, store().hashes)]
    return {text.path: file_identity(text.path) for text in pinned}

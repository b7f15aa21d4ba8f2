"""Read the parents, the recipe and the provenance of the last release, for the next round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.parsing import read_plain, read_yaml
from mergegate.merge_core.recipe import expand_user_path, parse_reference
from mergegate.tasks.checkpoints import files_digest


def used_digests(last_release: Path) -> frozenset[str]:
    """Return the digests of a release's parents (including clients that the merge left out) and of their adapters."""
    try:
        parents = _read_predicate(last_release)["buildDefinition"]["resolvedDependencies"]
        adapters = [
            parent["annotations"]["adapter"]["files"]
            for parent in parents
            if "adapter" in parent.get("annotations", {})
        ]
        return frozenset((*(str(parent["digest"]["sha256"]) for parent in parents), *map(files_digest, adapters)))
    except (OSError, MergegateError, KeyError, TypeError, AttributeError):
        return frozenset()


def last_recipe(last_release: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the documents of a release's recipe.

    Raises:
        InvalidInput: The recipe cannot be read.
    """
    from mergegate.tasks.publish import RECIPE  # Imported late, because 'mergegate merge' needs no publication.

    documents = read_yaml(last_release / RECIPE, "the recipe of the last release")
    mappings = tuple(document for document in documents if isinstance(document, Mapping))
    if not mappings or len(mappings) < len(documents):
        raise InvalidInput(str(last_release / RECIPE), found=f"{documents!r:.60}", expected="the recipe of a release")
    return mappings


def is_reproducible(last_release: Path, directory: Path, digest_of: Callable[[Path], str]) -> bool:
    """Return whether all parents of a release still exist unchanged.

    Models on the Hub count as unchanged. A release without readable provenance counts as reproducible.
    """
    from mergegate.tasks.publish import PROVENANCE

    def is_unchanged(parent: Mapping[str, Any]) -> bool:
        notes, digest = parent.get("annotations", {}), parent["digest"]
        adapter, reference = notes.get("adapter"), parse_reference(parent["name"], PROVENANCE)
        if notes.get("role") == "text" or (adapter or digest).get("gitCommit"):
            return True
        path, expected_digest = reference.path, digest["sha256"]
        if adapter:  # the model it is applied to is a parent of its own
            path, expected_digest = str(reference.adapter), files_digest(adapter["files"])
        return (directory / expand_user_path(path)).is_dir() and digest_of(
            directory / expand_user_path(path)
        ) == expected_digest

    try:
        parents = _read_predicate(last_release)["buildDefinition"]["resolvedDependencies"]
    except (OSError, MergegateError, KeyError, TypeError):
        return True
    try:
        return all(map(is_unchanged, parents))
    except (OSError, MergegateError, KeyError, TypeError, AttributeError, ValueError):
        return False


def _read_predicate(last_release: Path) -> Any:
    """Return the predicate of a release's provenance, which describes how the release was built."""
    from mergegate.tasks.publish import PROVENANCE, read_document

    return read_document(read_plain(last_release / PROVENANCE, 64 << 20), PROVENANCE)["predicate"]

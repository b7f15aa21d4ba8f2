"""What the last release tells the next round: what it was made of, what it began with, what its optimizer has kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.parsing import parse_json, read_plain, read_yaml
from mergegate.merge_core.recipe import expand_user_path, parse_reference
from mergegate.tasks.checkpoints import files_digest
from mergegate.tasks.publish import PROVENANCE, RECIPE


def counted(released: Path) -> frozenset[str]:
    """Digests of all that a release was made of, also of what its round left out; of adapters by themselves, too."""
    try:
        parents = _predicate(released)["buildDefinition"]["resolvedDependencies"]
        adapters = [
            one["annotations"]["adapter"]["files"] for one in parents if "adapter" in one.get("annotations", {})
        ]
        return frozenset((*(str(one["digest"]["sha256"]) for one in parents), *map(files_digest, adapters)))
    except (OSError, MergegateError, KeyError, TypeError, AttributeError):
        return frozenset()


def last_recipe(released: Path) -> tuple[Mapping[str, Any], ...]:
    """The documents that a release was made by.

    Raises:
        InvalidInput: They cannot be read.
    """
    documents = read_yaml(released / RECIPE, "the recipe of the last release")
    found = tuple(one for one in documents if isinstance(one, Mapping))
    if not found or len(found) < len(documents):
        raise InvalidInput(str(released / RECIPE), found=f"{documents!r:.60}", expected="the recipe of a release")
    return found


def is_as_made(released: Path, directory: Path, digest_of: Callable[[Path], str]) -> bool:
    """Whether all that a release was made of is still there and the same. Of the Hub, and where none can tell: yes."""

    def same(parent: Mapping[str, Any]) -> bool:
        notes, digest = parent.get("annotations", {}), parent["digest"]
        adapter, reference = notes.get("adapter"), parse_reference(parent["name"], PROVENANCE)
        if notes.get("role") == "text" or (adapter or digest).get("gitCommit"):
            return True
        place, wanted = reference.path, digest["sha256"]
        if adapter:  # what it is applied to is a parent of its own
            place, wanted = str(reference.adapter), files_digest(adapter["files"])
        return (directory / expand_user_path(place)).is_dir() and digest_of(
            directory / expand_user_path(place)
        ) == wanted

    try:
        parents = _predicate(released)["buildDefinition"]["resolvedDependencies"]
    except (OSError, MergegateError, KeyError, TypeError):
        return True
    try:
        return all(map(same, parents))
    except (OSError, MergegateError, KeyError, TypeError, AttributeError, ValueError):
        return False


def begun_with(released: Path, directory: Path, digest_of: Callable[[Path], str]) -> str | None:
    """What the last round began with, as its recipe names it, if it is still there and still the same."""
    with suppress(MergegateError, OSError, ValueError):
        *_, last = last_recipe(released)
        base = last.get("base_model")
        if isinstance(base, str) and (directory / base).is_dir() and digest_of(directory / base) in counted(released):
            return base
    return None


def kept_states(
    released: Path, place_of: Callable[[str], Path | None], digest_of: Callable[[Path], str]
) -> dict[str, Path]:
    """Where that lies by name which the optimizer of the last round has kept: all of it, as its provenance tells, or
    nothing."""
    found: dict[str, Path] = {}
    with suppress(MergegateError, OSError, ValueError, KeyError, TypeError, AttributeError):
        for one in _predicate(released)["runDetails"]["byproducts"]:
            place = place_of(str(one["annotations"]["stored"]))
            if place is None or digest_of(place) != one["digest"]["sha256"]:
                return {}
            found[str(one["name"])] = place
    return found


def _predicate(released: Path) -> Any:
    return parse_json(read_plain(released / PROVENANCE, 64 << 20), PROVENANCE)["predicate"]

"""The recipes that a profile would release: its own, then the remedies, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from merge_core import Recipe, load_recipe
from merge_core.errors import InvalidInput
from merge_core.parsing import parse_yaml
from merge_core.recipe import apply_overrides

# In a profile: a file, or the same inline; a remedy may also be changes of the profile's own recipe.
Written = Path | dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One recipe, and how a person would speak of it.

    Args:
        remedy: What is changed: ``density: 0.3`` or the name of a file; empty for the profile's own recipe.
        recipe: What is merged.
        text: The recipe as YAML.
    """

    remedy: str
    recipe: Recipe
    text: str

    @property
    def document(self) -> Mapping[str, Any] | None:
        """The recipe as plain data; None for one of several documents."""
        documents = parse_yaml(self.text, self.recipe.where)
        return documents[0] if len(documents) == 1 else None


def candidate_recipes(own: Written, remedies: Sequence[Written], root: Path, where: str) -> tuple[Candidate, ...]:
    """The recipe ``own`` and its remedies; relative paths are relative to ``root``.

    Raises:
        InvalidInput: For a recipe that cannot mean anything, or a change that does not fit the recipe.
    """
    first = _candidate(own, "", root, f"{where}: recipe")
    found = [first]
    for position, remedy in enumerate(remedies):
        place = f"{where}: remedies[{position}]"
        if isinstance(remedy, Path):
            found.append(_candidate(remedy, str(remedy), root, place))
        elif "experts" in remedy or ("merge_method" in remedy and ({"models", "slices", "modules"} & remedy.keys())):
            found.append(_candidate(remedy, "another recipe", root, place))
        else:
            if first.document is None:
                raise InvalidInput(
                    place,
                    found="changes of a recipe of several documents",
                    expected="changes of one document",
                    remedy="name a whole recipe",
                )
            changed = apply_overrides(first.document, remedy, place)
            words = ", ".join(f"{name}: {value}" for name, value in remedy.items())
            found.append(_inline(changed, words, first.recipe.directory or root, place))
    return tuple(found)


def _candidate(written: Written, remedy: str, root: Path, where: str) -> Candidate:
    if isinstance(written, Path):
        file = root / written
        return Candidate(remedy, load_recipe(file), file.read_text(encoding="utf-8"))
    return _inline(written, remedy, root, where)


def _inline(written: Mapping[str, Any], remedy: str, directory: Path, where: str) -> Candidate:
    text = yaml.safe_dump(dict(written), sort_keys=False, allow_unicode=True)
    return Candidate(remedy, replace(load_recipe(written, where=where), directory=directory), text)

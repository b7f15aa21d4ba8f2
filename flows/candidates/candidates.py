"""The recipes that a profile would release: its own, then the remedies, in the order in which they are tried."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from mergegate.merge_core import Recipe, load_recipe
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import MAX_YAML_BYTES, LocalPath, parse_yaml, read_text, read_yaml
from mergegate.merge_core.recipe import apply_overrides

# In a profile: a file, or the same inline; a remedy may also be changes of the profile's own recipe.
Written = LocalPath | dict[str, Any]
# In place of a remedy: what the refusal itself proposes. Of these so many are tried at most: each costs a night's merge
# and part of the error that a run may make, and after three the diagnosis is hardly to be believed.
AUTO: Literal["auto"] = "auto"
MOST_PROPOSED = 3


@dataclass(frozen=True)
class Candidate:
    """One recipe, and how a person would speak of it.

    Args:
        remedy: What is changed: ``density: 0.3`` or the name of a file; empty for the profile's own recipe.
        recipe: What is merged.
        text: The recipe as YAML.
        change: Of the profile's own recipe, which makes it this one; None for another recipe.
        remarks: Who takes part and who does not, of a round of clients.
    """

    remedy: str
    recipe: Recipe
    text: str
    change: Mapping[str, Any] | None = None
    remarks: tuple[str, ...] = ()

    @property
    def document(self) -> Mapping[str, Any] | None:
        """The recipe as plain data; None for one of several documents."""
        documents = parse_yaml(self.text, self.recipe.where)
        return documents[0] if len(documents) == 1 else None


@dataclass(frozen=True)
class SearchedRecipe:
    """A recipe in which some values are to be searched for.

    Args:
        document: As its YAML says it, with ``$name`` for what is free.
        directory: What its paths are relative to.
        where: What messages call it.
    """

    document: Mapping[str, Any]
    directory: Path
    where: str


def searched_recipe(written: Written, root: Path, where: str) -> SearchedRecipe:
    """Read a recipe whose holes are still open; a relative path is relative to ``root``.

    Raises:
        InvalidInput: For a file that is not there, is no YAML, or has not one document.
    """
    if not isinstance(written, Path):
        return SearchedRecipe(written, root, f"{where}: recipe")
    file = root / written
    documents = read_yaml(file, "a recipe (YAML)")
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        raise InvalidInput(
            str(file),
            found=f"{len(documents)} documents" if len(documents) != 1 else type(documents[0]).__name__,
            expected="one mapping: a sweep searches in a recipe of one document",
        )
    return SearchedRecipe(documents[0], file.parent, str(file))


def recipe_of_documents(documents: Sequence[Mapping[str, Any]], directory: Path, where: str) -> Candidate:
    """What somebody would release who wrote these documents into a file in ``directory``.

    Raises:
        InvalidInput: For a recipe that cannot mean anything.
    """
    return _inline(documents, "", directory, where)


def candidate_recipes(
    own: Written | SearchedRecipe | Candidate, remedies: Sequence[Written | SearchedRecipe], root: Path, where: str
) -> tuple[Candidate, ...]:
    """The recipe ``own`` and its remedies; relative paths are relative to ``root``.

    Args:
        own, remedies: Of a recipe that is searched, with its holes filled; ``own`` may have been read already.

    Raises:
        InvalidInput: For a recipe that cannot mean anything, or a change that does not fit the recipe.
    """
    if isinstance(own, Candidate):
        first = own
    elif isinstance(own, SearchedRecipe):
        first = _inline([own.document], "", own.directory, own.where)
    else:
        first = _candidate(own, "", root, f"{where}: recipe")
    first = replace(first, change={})
    found = [first]
    for position, remedy in enumerate(remedies):
        place = f"{where}: remedies[{position}]"
        if isinstance(remedy, SearchedRecipe):
            found.append(_inline([remedy.document], "another recipe", remedy.directory, remedy.where))
        elif isinstance(remedy, Path):
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
            found.append(changed_candidate(first, remedy, root, place))
    return tuple(found)


def changed_candidate(of: Candidate, change: Mapping[str, Any], root: Path, where: str) -> Candidate:
    """Another candidate that differs from one of a single document by ``change``.

    Raises:
        InvalidInput: For a change that does not fit the recipe.
    """
    assert of.document is not None
    words = ", ".join(f"{name}: {_in_line(value)}" for name, value in change.items())
    made = _inline([apply_overrides(of.document, change, where)], words, of.recipe.directory or root, where)
    return replace(made, change=None if of.change is None else {**of.change, **change})


def _in_line(value: object) -> str:
    """Plain data as a person writes it, in a line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def _candidate(written: Written, remedy: str, root: Path, where: str) -> Candidate:
    if isinstance(written, Path):
        file = root / written
        return Candidate(remedy, load_recipe(file), read_text(file, MAX_YAML_BYTES))
    return _inline([written], remedy, root, where)


def _inline(documents: Sequence[Mapping[str, Any]], remedy: str, directory: Path, where: str) -> Candidate:
    plain = [dict(document) for document in documents]
    text = yaml.safe_dump_all(plain, sort_keys=False, allow_unicode=True)
    recipe = load_recipe(plain[0] if len(plain) == 1 else text, where=where)
    return Candidate(remedy, replace(recipe, directory=directory), text)

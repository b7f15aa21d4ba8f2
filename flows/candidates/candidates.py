"""Read the candidate recipes of a profile: its own recipe, then the remedies in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from mergegate.flows.candidates.run_expansion import expand_training_runs
from mergegate.merge_core import Recipe, load_recipe
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import MAX_YAML_BYTES, LocalPath, flow_yaml, parse_yaml, read_text, read_yaml
from mergegate.merge_core.recipe import RunWindow, apply_overrides, plain_mapping

# A recipe in a profile: a file or an inline recipe. A remedy may also be a set of changes to the profile's own recipe.
Written = LocalPath | dict[str, Any]
# The value in ``remedies`` that lets mergegate propose more, and their maximum number. Each one costs a full merge and
# part of the error rate of the run, and after three attempts the diagnosis is unlikely to be right.
AUTO: Literal["auto"] = "auto"
MOST_PROPOSED = 3
# Keys that list models. A remedy with a merge method and one of them is a complete recipe.
_MODEL_KEYS = ("models", "slices", "modules", "run")


@dataclass(frozen=True)
class Candidate:
    """One recipe, with its label for users.

    Args:
        remedy: Description of the change, such as ``density: 0.3`` or a file name. Empty for the profile's own recipe.
        recipe: Recipe to merge.
        text: The recipe as YAML.
        change: Change of the profile's own recipe that produces this one. None for an independent recipe.
        remarks: For a round of clients, which clients take part and which do not. For a training run, its window.
        windows: Window of each training run that the recipe merges.
        written: The recipe with the keys of its training run, to which changes apply. None without a run.
    """

    remedy: str
    recipe: Recipe
    text: str
    change: Mapping[str, Any] | None = None
    remarks: tuple[str, ...] = ()
    windows: tuple[RunWindow, ...] = ()
    written: Mapping[str, Any] | None = None

    @property
    def last_checkpoints(self) -> tuple[str, ...]:
        """Reference of the last checkpoint of each training run."""
        return tuple(window.checkpoints[-1] for window in self.windows)

    @property
    def summary(self) -> str:
        """Short description of the recipe, for example ``linear of 8 checkpoints``."""
        return self.recipe.summary("checkpoint" if self.windows and not self.recipe.steps else "")

    @property
    def document(self) -> Mapping[str, Any] | None:
        """The recipe as plain data. None for a recipe of several documents."""
        documents = parse_yaml(self.text, self.recipe.location)
        return documents[0] if len(documents) == 1 else None


@dataclass(frozen=True)
class SearchedRecipe:
    """A recipe whose ``document`` has a placeholder ``$name`` for each free value of a sweep.

    Paths in the recipe are relative to ``directory``. ``location`` is the name of the recipe in messages. ``windows``
    and ``remarks`` are those of its training runs, which are already expanded.
    """

    document: Mapping[str, Any]
    directory: Path
    location: str
    windows: tuple[RunWindow, ...] = ()
    remarks: tuple[str, ...] = ()


def searched_recipe(source: Written, root: Path, location: str) -> SearchedRecipe:
    """Read a recipe with unfilled placeholders. A relative path is relative to ``root``."""
    document: object = source
    directory, location = root, f"{location}: recipe"
    if isinstance(source, Path):
        directory, location = (root / source).parent, str(root / source)
        documents = read_yaml(root / source, "a recipe (YAML)")
        if len(documents) != 1 or not isinstance(documents[0], Mapping):
            raise InvalidInput(
                location,
                found=f"{len(documents)} documents" if len(documents) != 1 else type(documents[0]).__name__,
                expected="one document with a mapping, because a sweep needs a single recipe",
            )
        document = documents[0]
    assert isinstance(document, Mapping)
    expanded = expand_training_runs([document], directory, location)
    return SearchedRecipe(expanded.documents[0], directory, location, expanded.windows, expanded.remarks)


def candidate_recipes(
    own_recipe: Written | SearchedRecipe | Candidate,
    remedies: Sequence[Written | SearchedRecipe],
    root: Path,
    label: str,
) -> tuple[Candidate, ...]:
    """Read a recipe and its remedies, in this order.

    Args:
        own_recipe: Recipe of the profile. It may already be parsed.
        remedies: Remedies in order. In a searched recipe, all placeholders must be filled.
        root: Directory that paths are relative to.
        label: Name of the profile in messages.

    Raises:
        InvalidInput: A recipe is invalid, or a change does not fit the recipe.
    """
    if isinstance(own_recipe, Candidate):
        first = own_recipe
    elif isinstance(own_recipe, SearchedRecipe):
        first = recipe_of_documents([own_recipe.document], own_recipe.directory, own_recipe.location)
        first = replace(first, windows=own_recipe.windows, remarks=own_recipe.remarks)
    else:
        first = _candidate(own_recipe, "", root, f"{label}: recipe")
    first = replace(first, change={})
    candidates = [first]
    for position, remedy in enumerate(remedies):
        location = f"{label}: remedies[{position}]"
        if isinstance(remedy, SearchedRecipe):
            candidates.append(
                recipe_of_documents([remedy.document], remedy.directory, remedy.location, "another recipe")
            )
        elif isinstance(remedy, Path):
            candidates.append(_candidate(remedy, str(remedy), root, location))
        elif "experts" in remedy or ("merge_method" in remedy and not remedy.keys().isdisjoint(_MODEL_KEYS)):
            candidates.append(_candidate(remedy, "another recipe", root, location))
        else:
            if first.document is None:
                raise InvalidInput(
                    location,
                    found="changes of a recipe with several documents",
                    expected="changes of a recipe with one document",
                    remedy="write a complete recipe, or name its file",
                )
            candidates.append(changed_candidate(first, remedy, root, location))
    return tuple(candidates)


def changed_candidate(original: Candidate, change: Mapping[str, Any], root: Path, location: str) -> Candidate:
    """Apply ``change`` to the single document of a candidate, and return the result as another candidate.

    A change of a recipe with a training run applies to the recipe as it is written, unless it replaces the models.
    """
    document = original.document if original.written is None or "models" in change else original.written
    assert document is not None
    words = ", ".join(f"{name}: {flow_yaml(value)}" for name, value in change.items())
    documents = [apply_overrides(document, change, location)]
    candidate = recipe_of_documents(documents, original.recipe.directory or root, location, words)
    return replace(candidate, change=None if original.change is None else {**original.change, **change})


def recipe_of_file(file: Path, remedy: str = "") -> Candidate:
    """Read a recipe file. Its training runs are replaced with the checkpoints that exist now."""
    documents = read_yaml(file, "a recipe in YAML")
    if any(isinstance(document, Mapping) and "run" in document for document in documents):
        mappings = [plain_mapping(document, str(file)) for document in documents]
        return recipe_of_documents(mappings, file.resolve().parent, str(file), remedy)
    return Candidate(remedy, load_recipe(file), read_text(file, MAX_YAML_BYTES))


def _candidate(source: Written, remedy: str, root: Path, location: str) -> Candidate:
    if isinstance(source, Path):
        return recipe_of_file(root / source, remedy)
    return recipe_of_documents([source], root, location, remedy)


def recipe_of_documents(
    documents: Sequence[Mapping[str, Any]], directory: Path, location: str, remedy: str = ""
) -> Candidate:
    """Build a candidate from documents as if they were a recipe file in ``directory``.

    Training runs are replaced with the checkpoints that exist now.
    """
    expanded = expand_training_runs(documents, directory, location)
    plain = [dict(document) for document in expanded.documents]
    text = yaml.safe_dump_all(plain, sort_keys=False, allow_unicode=True)
    recipe = load_recipe(plain[0] if len(plain) == 1 else text, location=location)
    return Candidate(
        remedy,
        replace(recipe, directory=directory),
        expanded.comments + text,
        remarks=expanded.remarks,
        windows=expanded.windows,
        written=documents[0] if expanded.windows and len(documents) == 1 else None,
    )

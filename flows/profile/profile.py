"""Read profiles from YAML files and overrides, and the recipes that they name.

mergegate reports all faults of a profile together, each with its location and a suggestion: unknown or misspelled keys,
values out of range, guards without a parent. A profile reads each of its recipes once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from mergegate.flows.candidates import (
    AUTO,
    TUNE,
    Candidate,
    ExpandedRecipe,
    SearchedRecipe,
    TuningSize,
    Written,
    candidate_recipes,
    client_digest,
    client_round,
    recipe_of_documents,
    scale_search,
    searched_recipe,
)
from mergegate.flows.profile.faults import parse_settings
from mergegate.flows.profile.schema import NAME_PATTERN, ProfileSettings
from mergegate.merge_core.errors import InvalidInput, MergegateError, to_printable
from mergegate.merge_core.files import FileIdentity, file_identity
from mergegate.merge_core.parsing import describe_kind, read_yaml, with_overrides
from mergegate.tasks.base.stage import store
from mergegate.tasks.sweep import read_soup_recipe, relocate_recipe, start_recipe


class Profile(ProfileSettings):
    """How a merge is released: recipe, checks, evidence, target."""

    def headline(self) -> str:
        """Summarize the profile in one line: ``demo · ties of 2 over base``."""
        candidate, *remedies = self.candidates()
        more = f", {len(remedies)} {'remedy' if len(remedies) == 1 else 'remedies'}" if remedies else ""
        more += ", then its best scale" if TUNE in self.remedies else ""
        more += ", then the proposals of a refusal" if self.max_proposed_remedies else ""
        overrides = f" · {', '.join(self.overrides)}" if self.overrides else ""
        return f"{self.name} · {candidate.summary}{more}{overrides}"

    @cached_property
    def scale_search(self) -> Profile | None:
        """The profile of the search behind the remedy ``tune: scale``. None if the profile does not have this remedy.

        Raises:
            InvalidInput: The profile has no tasks, or the recipe does not have exactly one scale.
        """
        return self.with_scale_search(TuningSize()) if TUNE in self.remedies else None

    def with_scale_search(self, size: TuningSize) -> Profile:
        """Return this profile with a search for the scale of its merge on the documents of its tasks.

        Raises:
            InvalidInput: The profile has a search or no task, or the recipe does not have exactly one scale.
        """
        location = f"profile {self.name}"
        if self.sweep:
            raise InvalidInput(
                location,
                found="a section 'sweep'",
                expected="a recipe without free parameters",
                remedy="run mergegate sweep, which searches all free parameters",
            )
        if not self.evaluate:
            raise InvalidInput(location, found="no tasks", expected="evaluate.tasks, whose documents the search uses")
        recipe = self.searched_recipe
        content, settings = scale_search(recipe, [guard.task for guard in self.evaluate.tasks], size)
        searching = self.with_recipe(relocate_recipe(content, recipe.directory, self.root))
        return parse_settings(Profile, {**searching.settings(), "sweep": settings}, location)

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the recipe, then the remedies in order. They are read and parsed once.

        Raises:
            InvalidInput: A recipe is invalid, or a change does not fit the recipe.
        """
        return self._candidates

    @property
    def is_as_read(self) -> bool:
        """Whether no recipe file has changed since it was read. Always False for clients and training runs."""
        if self.__dict__.get("_client_round") is not None:  # the directories of clients may change at any time
            return False
        searched = self.__dict__.get("searched_recipe")  # so may the checkpoints of a training run
        if any(recipe.windows for recipe in (*self.__dict__.get("_candidates", ()), *([searched] if searched else ()))):
            return False
        return "_recipes_read" not in self.__dict__ or self._recipes_read == self._recipe_files()

    @cached_property
    def _recipes_read(self) -> dict[Path, FileIdentity | None]:
        """Identities of the recipe files at the time they were read."""
        return self._recipe_files()

    def _recipe_files(self) -> dict[Path, FileIdentity | None]:
        files = [self.root / path for path in (self.recipe, *self.remedies) if isinstance(path, Path)]
        identities: dict[Path, FileIdentity | None] = dict.fromkeys(files)
        for file in files:
            with suppress(OSError, ValueError):  # reading such a file later reports the reason
                identities[file] = file_identity(file)
        return identities

    @cached_property
    def _candidates(self) -> tuple[Candidate, ...]:
        _ = self._recipes_read
        recipe: Written | SearchedRecipe | Candidate = self.recipe
        if self.sweep:
            searched = self.searched_recipe
            recipe = replace(searched, document=start_recipe(searched.document, self.sweep, searched.location))
        written = [remedy for remedy in self.remedies if remedy not in (AUTO, TUNE)]
        if (round_and_directory := self._client_round) is not None:
            client_recipe, directory = round_and_directory
            candidate = recipe_of_documents(client_recipe.documents, directory, f"profile {self.name}: recipe")
            recipe = replace(candidate, text=client_recipe.comments + candidate.text, remarks=client_recipe.remarks)
        return candidate_recipes(recipe, written, self.root, f"profile {self.name}")

    @property
    def is_client_round(self) -> bool:
        """Whether the recipe merges the models of clients."""
        return self._client_round is not None

    @cached_property
    def _client_round(self) -> tuple[ExpandedRecipe, Path] | None:
        """The round of clients that the recipe describes, and the directory of its paths. None for any other recipe."""
        documents: list[object] = [self.recipe]
        directory = self.root
        if isinstance(self.recipe, Path):
            directory, documents = (self.root / self.recipe).parent, []
            with suppress(MergegateError, OSError, ValueError):  # reading it as a recipe reports the error
                documents = read_yaml(self.root / self.recipe, "a recipe in YAML")
        document = documents[0] if len(documents) == 1 else None
        if not isinstance(document, Mapping) or "clients" not in document:
            return None
        released = self.publish.current_release(self.root) if self.publish else None
        new_round = client_round(
            document,
            directory,
            f"profile {self.name}: recipe",
            last_release=released.directory if released else None,
            digest_of=lambda path: client_digest(path, store().hashes),
        )
        return new_round, directory

    @cached_property
    def searched_recipe(self) -> SearchedRecipe:
        """The recipe with unfilled placeholders.

        Raises:
            InvalidInput: The recipe cannot be read, has several documents, or does not fit the soup.
        """
        _ = self._recipes_read
        recipe = searched_recipe(self.recipe, self.root, f"profile {self.name}")
        if self.sweep and self.sweep.soup:
            read_soup_recipe(recipe.document, recipe.location)
        return recipe

    def with_recipe(self, recipe: Mapping[str, Any]) -> Profile:
        """Return this profile with another recipe, whose paths are relative to ``root``, and without remedies."""
        return Profile.model_validate({**self.settings(), "recipe": dict(recipe), "remedies": ()})


def load_profile(source: Path | Profile, overrides: Sequence[str] = (), *, needs_recipe: bool = True) -> Profile:
    """Load a profile from a file, or apply ``overrides`` to one that is already parsed.

    An override has the form ``KEY=VALUE`` and applies to this run only. Without ``needs_recipe``, the file needs no
    ``name`` and no ``recipe``, for commands that do not merge.

    Raises:
        InvalidInput: The file cannot be read, is not YAML, or is not a valid profile.
    """
    if isinstance(source, Profile):
        # An override may be below a section, so sections must be plain data.
        settings = source.model_dump(exclude_unset=True) if overrides else source.settings()
        data = with_overrides({**settings, "root": source.root.absolute()}, overrides)
        return parse_profile({**data, "overrides": (*source.overrides, *overrides)}, f"profile {source.name}")
    try:
        status = source.stat()
    except OSError:  # _read_profile reports the error
        return _read_profile(source, tuple(overrides), needs_recipe)
    identity = (status.st_ino, status.st_size, status.st_mtime_ns)
    profile = _profile_once(source.absolute(), source, tuple(overrides), needs_recipe, identity)
    if profile.is_as_read:
        return profile
    _profile_once.cache_clear()
    return _profile_once(source.absolute(), source, tuple(overrides), needs_recipe, identity)


def override_profile(
    source: Path | Profile, overrides: Sequence[str] | None, *, needs_recipe: bool = True
) -> Path | Profile:
    """Return a profile with overrides. Without any, a path stays a path, because Prefect stores a flow's arguments.

    Raises:
        InvalidInput: The profile or an override is invalid.
    """
    return load_profile(source, overrides, needs_recipe=needs_recipe) if overrides else source


@lru_cache(maxsize=8)
def _profile_once(
    file: Path, source: Path, overrides: tuple[str, ...], needs_recipe: bool, identity: tuple[int, ...]
) -> Profile:
    """Read a profile only once per run, because the command line needs its headline and the flow needs the rest."""
    return _read_profile(source, overrides, needs_recipe)


def _read_profile(source: Path, overrides: tuple[str, ...], needs_recipe: bool) -> Profile:
    data = _mapping_in(source)
    if _is_recipe_document(data):
        raise InvalidInput(
            str(source),
            found="it is a recipe, and this command needs a profile",
            expected="a profile, which names a recipe and its release settings",
            remedy=f"write a profile with 'recipe: {source.name}', or run mergegate merge {source} OUT",
        )
    if "overrides" in data:
        raise InvalidInput(
            f"{source}: overrides",
            found="overrides in a file",
            expected="each setting under its own key",
            remedy="remove this key; to override a setting for one run: mergegate run PROFILE --set KEY=VALUE",
        )
    name = source.stem if is_release_name(source.stem) else "profile"
    defaults: dict[str, object] = {} if needs_recipe else {"name": name, "recipe": {}}
    values = with_overrides({"root": source.absolute().parent, **defaults, **data}, overrides)
    location = " ".join([str(source), *(f"--set {override}" for override in overrides)])
    return parse_profile({**values, "overrides": overrides}, location)


def profile_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a profile file, for editors."""
    schema = Profile.model_json_schema(mode="validation")
    del schema["properties"]["root"]  # follows from the location of the file
    schema["title"] = "mergegate: a profile"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def profile_name(profile: Path | Profile | str) -> str:
    """Return the name of a profile, even of an invalid one, or else the name of its file. Never raises."""
    if isinstance(profile, Profile):
        return profile.name
    file = Path(profile)
    with suppress(Exception):  # the flow reports the error
        return load_profile(file).name
    with suppress(Exception):
        name = _mapping_in(file).get("name")
        if isinstance(name, str) and is_release_name(name):
            return name
    return to_printable(file.stem) or "profile"


def is_release_name(name: str) -> bool:
    """Return whether ``name`` is valid as the name of a profile."""
    return re.fullmatch(NAME_PATTERN, name) is not None


def is_recipe(file: Path) -> bool:
    """Return whether the file contains a recipe, not a profile.

    Raises:
        InvalidInput: The file cannot be read.
    """
    return any(isinstance(document, Mapping) and _is_recipe_document(document) for document in _documents_in(file))


def _is_recipe_document(document: Mapping[str, object]) -> bool:
    """Return whether a document has keys that only recipes have. A misspelled merge method does not matter."""
    if "merge_method" in document or "experts" in document:
        return True
    return "recipe" not in document and not document.keys().isdisjoint(("models", "slices", "modules", "run"))


def parse_profile(data: Mapping[str, object], location: str) -> Profile:
    """Parse a profile from plain data. ``location`` is the name of the data in messages.

    Raises:
        InvalidInput: The data is invalid. The error lists all faults.
    """
    return parse_settings(Profile, data, location)


def _mapping_in(file: Path) -> Mapping[str, object]:
    documents = _documents_in(file)
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        found = f"{len(documents)} documents" if len(documents) > 1 else describe_kind(documents[0])
        raise InvalidInput(str(file), found=found, expected="one mapping with name, recipe, publish, …")
    return documents[0]


def _documents_in(file: Path) -> list[object]:
    return read_yaml(file, "a profile (YAML)") or [None]

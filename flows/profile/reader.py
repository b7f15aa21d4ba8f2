"""Read profiles from YAML files and overrides.

mergegate reports all faults of a profile together, each with its location and a suggestion: unknown or misspelled keys,
values out of range, guards without a parent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from mergegate.flows.profile.faults import parse_settings
from mergegate.flows.profile.profile import Profile
from mergegate.flows.profile.schema import NAME_PATTERN
from mergegate.merge_core.errors import InvalidInput, to_printable
from mergegate.merge_core.parsing import describe_kind, read_yaml, with_overrides


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

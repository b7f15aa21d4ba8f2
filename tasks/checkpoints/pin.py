"""Pinning: from the names in a recipe to bytes that cannot change under the run.

Two steps, because the cheap refusals come between them. ``resolve_parents`` turns each reference into a directory or,
for the Hub, a commit with its small files; licences and headers (``open_parent``) are checked on that. When the weights
have come (``tasks.checkpoints.fetch``), ``pin_checkpoints`` hashes the files that matter, each once
(``merge_core.store.hashing``), into the digest that every key speaks of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from merge_core import Checkpoint, CheckpointRef, Recipe, open_checkpoint, resolve_local
from merge_core.errors import InvalidInput, MergegateError
from merge_core.recipe import expanded, parse_reference
from merge_core.store import HashMemo, NotInKey, merkle
from tasks.checkpoints.files import deciding_files
from tasks.checkpoints.hub.errors import all_at_once
from tasks.checkpoints.hub.headers import open_snapshot
from tasks.checkpoints.hub.snapshot import Snapshot, find_snapshot
from tasks.checkpoints.model import Model

# Where a reference leads, or why nowhere.
Located = tuple[Path, Snapshot | None] | MergegateError


class ResolvedCheckpoint(BaseModel):
    """A parent of the merge, found but not yet read. Of one on the Hub the weights need not be here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # unique in the run
    ref: str  # as the recipe writes it
    directory: Annotated[Path, NotInKey]
    revision: str | None = None  # commit of a Hub repository; None for a local directory
    is_base: bool = False
    is_merged: Annotated[bool, NotInKey] = True  # its weights are, see ``Recipe.merged_references``
    snapshot: Annotated[Snapshot | None, NotInKey] = None  # of a Hub repository: what its commit lists


class PinnedCheckpoint(Model):
    """A parent of the merge, pinned. Only its digest is in a key: a parent is evaluated once, under any name."""

    ref: Annotated[str, NotInKey]  # the merge engine knows it by this
    revision: Annotated[str | None, NotInKey] = None
    is_base: Annotated[bool, NotInKey] = False
    is_merged: Annotated[bool, NotInKey] = True


@dataclass(frozen=True)
class PinnedRecipe:
    """A recipe whose identity speaks of its parents' content, not of their names or places."""

    recipe: Recipe
    parents: tuple[PinnedCheckpoint, ...]

    def content_key(self) -> object:
        return _substitute(self.recipe.canonical(), {parent.ref: parent.digest for parent in self.parents})


@dataclass(frozen=True)
class Search:
    """What came of looking for the parents of several recipes.

    Args:
        found: Of each recipe, in its order, those that were found.
        problems: One for each parent that was not.
    """

    found: tuple[tuple[ResolvedCheckpoint, ...], ...]
    problems: tuple[MergegateError, ...]


def search_parents(recipes: Sequence[Recipe]) -> Search:
    """Look for every checkpoint that the recipes name, local ones relative to the recipe's directory.

    Each reference is resolved once: recipes that name one branch get one commit, also when it moves meanwhile.
    """
    ask = cache(_snapshot)
    located = {
        (reference, recipe.directory): _locate(reference, recipe.directory, ask)
        for recipe in recipes
        for reference in recipe.references()
    }
    problems = [place for place in located.values() if isinstance(place, MergegateError)]
    return Search(tuple(_found(recipe, located) for recipe in recipes), tuple(problems))


def resolve_parents(recipe: Recipe) -> tuple[ResolvedCheckpoint, ...]:
    """Every checkpoint that the recipe names, in its order; local ones relative to the recipe's directory.

    Raises:
        InvalidInput: for references that are neither local directories nor repositories.
        Refused: for repositories that may not be read, or a Hub that cannot be reached.
    """
    return resolve_all_parents([recipe])[0]


def find_checkpoint(text: str) -> ResolvedCheckpoint:
    """One checkpoint by name: a directory, relative to where we are, or ``org/name@revision``.

    Raises:
        InvalidInput: for what is neither, or an adapter.
        Refused: for a repository that may not be read, or a Hub that cannot be reached.
    """
    # A directory may have an @ or a + in its name.
    reference = CheckpointRef(text) if expanded(text).is_dir() else parse_reference(text, text)
    if reference.adapter:
        raise InvalidInput(
            text,
            found="an adapter",
            expected="a whole checkpoint",
            remedy="merge the adapter into its model first: mergegate merge",
        )
    place = _locate(reference, None, _snapshot)
    if isinstance(place, MergegateError):
        raise place
    directory, snapshot = place
    revision = snapshot.commit if snapshot else None
    return ResolvedCheckpoint(name=reference.name, ref=text, directory=directory, revision=revision, snapshot=snapshot)


def resolve_all_parents(recipes: Sequence[Recipe]) -> tuple[tuple[ResolvedCheckpoint, ...], ...]:
    """As ``resolve_parents``, of several recipes: the same branch is the same commit in all of them."""
    search = search_parents(recipes)
    if search.problems:
        raise all_at_once(search.problems)
    return search.found


def open_parent(parent: ResolvedCheckpoint) -> Checkpoint:
    """Configuration and headers of a parent, whether or not its weights are here.

    Raises:
        InvalidInput: for files that cannot be a checkpoint.
        Refused: for headers that the Hub does not give.
    """
    return open_snapshot(parent.snapshot) if parent.snapshot else open_checkpoint(parent.directory)


def pin_checkpoints(found: Sequence[ResolvedCheckpoint], hashes: HashMemo) -> tuple[PinnedCheckpoint, ...]:
    """The same parents with their files that matter, all of which must be here, and the digest of those.

    Raises:
        InvalidInput: for a directory without any such file.
    """
    return tuple(_pinned(parent, hashes) for parent in found)


def pinned_before(found: Sequence[ResolvedCheckpoint], hashes: HashMemo) -> tuple[PinnedCheckpoint, ...]:
    """Those of the parents whose files are here and were all hashed before, pinned; nothing is read for it."""
    pinned: list[PinnedCheckpoint] = []
    for parent in found:
        names = parent.snapshot.deciding if parent.snapshot else deciding_files(parent.directory)
        if names and all(hashes.known(parent.directory / name) for name in names):
            pinned += pin_checkpoints([parent], hashes)
    return tuple(pinned)


def checkpoint_digest(directory: Path, hashes: HashMemo) -> str:
    """Merkle digest over (name, size, sha256) of the files of a checkpoint that matter.

    Raises:
        InvalidInput: for a directory without any such file.
    """
    return merkle(_hashed(directory, deciding_files(directory), hashes))


def _pinned(parent: ResolvedCheckpoint, hashes: HashMemo) -> PinnedCheckpoint:
    names = parent.snapshot.deciding if parent.snapshot else deciding_files(parent.directory)
    files = _hashed(parent.directory, names, hashes)
    return PinnedCheckpoint(
        **parent.model_dump(exclude={"snapshot"}),
        digest=merkle(files),
        files=tuple((name, sha256) for name, (_, sha256) in sorted(files.items())),
    )


def _hashed(directory: Path, names: Sequence[str], hashes: HashMemo) -> dict[str, tuple[int, str]]:
    """Size and sha256 by name."""
    files = {name: ((directory / name).stat().st_size, hashes.sha256(directory / name)) for name in names}
    if not files:
        raise InvalidInput(str(directory), found="no checkpoint files", expected="weights, config.json and a tokenizer")
    return files


def _locate(
    reference: CheckpointRef, root: Path | None, ask: Callable[[str, str | None], Snapshot | MergegateError]
) -> Located:
    try:
        local = resolve_local(reference, root)
    except MergegateError as error:
        return error
    if local is not None:
        return local.resolve(), None
    answer = ask(reference.path, reference.revision)
    return answer if isinstance(answer, MergegateError) else (answer.directory, answer)


def _snapshot(repo: str, revision: str | None) -> Snapshot | MergegateError:
    try:
        return find_snapshot(repo, revision)
    except MergegateError as error:
        return error


def _found(
    recipe: Recipe, located: Mapping[tuple[CheckpointRef, Path | None], Located]
) -> tuple[ResolvedCheckpoint, ...]:
    references, merged = recipe.references(), set(recipe.merged_references())
    found = []
    for reference, name in zip(references, _unique_names(references), strict=True):
        place = located[reference, recipe.directory]
        if isinstance(place, MergegateError):
            continue
        directory, snapshot = place
        found.append(
            ResolvedCheckpoint(
                name=name,
                ref=str(reference),
                directory=directory,
                revision=snapshot.commit if snapshot else None,
                is_base=recipe.base is not None and str(reference) == str(recipe.base),
                is_merged=reference in merged,
                snapshot=snapshot,
            )
        )
    return tuple(found)


def _substitute(value: object, digests: Mapping[str, str]) -> object:
    """``value`` with every string that is a reference replaced by the digest it stands for."""
    if isinstance(value, str):
        return digests.get(value, value)
    if isinstance(value, Mapping):
        return {digests.get(key, key): _substitute(inner, digests) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_substitute(inner, digests) for inner in value]
    return value


def _unique_names(references: Sequence[CheckpointRef]) -> list[str]:
    """Last path components where they tell the references apart, whole references where they do not."""
    counts = Counter(reference.name for reference in references)
    return [reference.name if counts[reference.name] == 1 else str(reference) for reference in references]

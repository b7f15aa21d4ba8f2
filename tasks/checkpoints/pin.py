"""Pinning: from the names in a recipe to bytes that cannot change under the run.

Two steps, because the cheap refusals come between them. ``resolve_parents`` turns each reference into a directory or,
for the Hub, a commit with its small files; licences and headers (``open_parent``) are checked on that. When the weights
have come (``tasks.checkpoints.fetch``), ``pin_checkpoints`` hashes the files that matter, each once
(``merge_core.files.hashing``), into the digest that every key speaks of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core import Checkpoint, CheckpointRef, Recipe, open_checkpoint, resolve_local
from mergegate.merge_core.adapters import CombinedSize, combined_size, is_own_text, require_products
from mergegate.merge_core.errors import Finding, InvalidInput, MergegateError
from mergegate.merge_core.files import FileIdentity, HashMemo, file_identity
from mergegate.merge_core.recipe import expand_user_path, parse_reference
from mergegate.tasks.checkpoints.adapter import PinnedAdapter, ResolvedAdapter
from mergegate.tasks.checkpoints.files import deciding_files, identify_files, without_model
from mergegate.tasks.checkpoints.hub.errors import combine_hub_errors
from mergegate.tasks.checkpoints.hub.headers import open_snapshot
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot, find_snapshot
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.store import NotInKey, merkle
from mergegate.tasks.store import digest as canonical_digest

# Where a reference leads, with its adapter; or why nowhere.
Located = tuple[Path, Snapshot | None, ResolvedAdapter | None] | MergegateError
# From repository, revision, and whether it is an adapter, to its commit, or why there is none.
AskHub = Callable[[str, str | None, bool], Snapshot | MergegateError]


class ResolvedCheckpoint(BaseModel):
    """A parent of the merge, found but not yet read. Of one on the Hub the weights need not be here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # unique in the run
    ref: str  # as the recipe writes it
    directory: Annotated[Path, NotInKey]
    revision: str | None = None  # commit of a Hub repository; None for a local directory
    is_base: bool = False
    is_merged: Annotated[bool, NotInKey] = True  # its weights are, see ``Recipe.merged_references``
    is_state: Annotated[bool, NotInKey] = False  # no model, see ``Recipe.states``
    snapshot: Annotated[Snapshot | None, NotInKey] = None  # of a Hub repository: what its commit lists
    adapter: Annotated[ResolvedAdapter | None, NotInKey] = None  # that is applied to it

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """What of it lies on the Hub: model, adapter."""
        both = (self.snapshot, self.adapter.snapshot if self.adapter else None)
        return tuple(one for one in both if one)

    @property
    def directories(self) -> tuple[Path, ...]:
        """Directories of the model and of its adapter."""
        return (self.directory, self.adapter.directory) if self.adapter else (self.directory,)

    @property
    def deciding(self) -> tuple[str, ...]:
        """Names of the files of the model that decide what it does."""
        return self.snapshot.deciding if self.snapshot else deciding_files(self.directory)


class PinnedCheckpoint(Model):
    """A parent of the merge, pinned. Only its digest is in a key: a parent is evaluated once, under any name."""

    ref: Annotated[str, NotInKey]  # the merge engine knows it by this
    revision: Annotated[str | None, NotInKey] = None
    is_base: Annotated[bool, NotInKey] = False
    is_merged: Annotated[bool, NotInKey] = True
    adapter: Annotated[PinnedAdapter | None, NotInKey] = None  # that is applied to it; in the digest

    def pinned(self) -> Mapping[Path, str]:
        return {**super().pinned(), **(self.adapter.pinned() if self.adapter else {})}

    def present(self) -> Iterable[Path]:
        return (*super().present(), *(self.adapter.pinned() if self.adapter else ()))

    @property
    def directories(self) -> tuple[Path, ...]:
        """Directories of the model and of its adapter."""
        return (self.directory, self.adapter.directory) if self.adapter else (self.directory,)

    def renamed(self, rename: Callable[[str], str]) -> PinnedCheckpoint:
        """Return the same parent under other names."""
        adapter = self.adapter and self.adapter.model_copy(update={"ref": rename(self.adapter.ref)})
        return self.model_copy(update={"name": rename(self.name), "ref": rename(self.ref), "adapter": adapter})

    def open(self) -> Checkpoint:
        """Its configuration and headers, with its adapter applied; its weights are here.

        Raises:
            InvalidInput: for files that cannot be a checkpoint, or an adapter of it.
        """
        model = open_checkpoint(self.directory)
        return self.adapter.applied_to(model) if self.adapter else model


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
        InvalidInput: for what is neither.
        Refused: for a repository that may not be read, or a Hub that cannot be reached.
    """
    # A directory may have an @ or a + in its name.
    reference = CheckpointRef(text) if expand_user_path(text).is_dir() else parse_reference(text, text)
    place = _locate(reference, None, _snapshot)
    if isinstance(place, MergegateError):
        raise place
    directory, snapshot, adapter = place
    return ResolvedCheckpoint(
        name=_name(reference),
        ref=text,
        directory=directory,
        revision=snapshot.commit if snapshot else None,
        snapshot=snapshot,
        adapter=adapter,
    )


def resolve_all_parents(recipes: Sequence[Recipe]) -> tuple[tuple[ResolvedCheckpoint, ...], ...]:
    """As ``resolve_parents``, of several recipes: the same branch is the same commit in all of them."""
    search = search_parents(recipes)
    if search.problems:
        raise combine_hub_errors(search.problems)
    return search.found


def open_parent(parent: ResolvedCheckpoint) -> Checkpoint:
    """Configuration and headers of a parent with its adapter, whether or not its weights are here.

    Raises:
        InvalidInput: for files that cannot be a checkpoint.
        Refused: for headers that the Hub does not give.
    """
    model = _open_base(parent)
    return parent.adapter.applied_to(model) if parent.adapter else model


def adapter_findings_of_parents(found: Sequence[ResolvedCheckpoint]) -> tuple[Finding, ...]:
    """What is odd about the adapters of the parents.

    Raises:
        InvalidInput, Refused: as :func:`open_parent`.
    """
    adapted = [(parent.ref, parent.adapter) for parent in found if parent.adapter]
    return tuple(one for ref, adapter in adapted for one in adapter.findings(ref.partition("+")[0]))


def require_combinable(recipe: Recipe, found: Sequence[ResolvedCheckpoint]) -> None:
    """See from headers that adapters of a recipe whose result is an adapter can be combined.

    Raises:
        InvalidInput: naming the first that cannot.
        Refused: as :func:`open_parent`.
    """
    if recipe.output is None:
        return
    for parent in found:
        if parent.adapter:
            require_products(parent.ref, _open_base(parent), parent.adapter.open())


def size_of_adapter(recipe: Recipe, found: Sequence[ResolvedCheckpoint]) -> CombinedSize | None:
    """What a recipe whose result is an adapter will make, from headers; None for other recipes.

    Raises:
        InvalidInput, Refused: as :func:`require_combinable`.
    """
    adapted = {parent.ref: parent for parent in found if parent.adapter}
    if recipe.output is None or not adapted:
        return None
    base = _open_base(next(iter(adapted.values())))
    return combined_size(recipe, base, {ref: one.adapter.open() for ref, one in adapted.items() if one.adapter})


def _open_base(parent: ResolvedCheckpoint) -> Checkpoint:
    """Headers of a parent without its adapter."""
    return open_snapshot(parent.snapshot) if parent.snapshot else open_checkpoint(parent.directory)


def pin_checkpoints(
    found: Sequence[ResolvedCheckpoint], hashes: HashMemo, trusted: Collection[str] = ()
) -> tuple[PinnedCheckpoint, ...]:
    """The same parents with their files that matter, all of which must be here, and the digest of those.

    Args:
        trusted: Repositories whose own code may be run, each at a commit: ``org/name@<40 hex digits>``.

    Raises:
        InvalidInput: for a directory without any such file.
    """
    return tuple(_pinned(parent, hashes, trusted) for parent in found)


def find_pinned_checkpoints(found: Sequence[ResolvedCheckpoint], hashes: HashMemo) -> tuple[PinnedCheckpoint, ...]:
    """Those of the parents whose files are here and were all hashed before, pinned; nothing is read for it."""
    pinned: list[PinnedCheckpoint] = []
    for parent in found:
        paths = [parent.directory / name for name in parent.deciding]
        if parent.adapter:
            paths += [parent.adapter.directory / name for name in parent.adapter.deciding]
        if paths and all(hashes.known(path) for path in paths):
            pinned += pin_checkpoints([parent], hashes)
    return tuple(pinned)


def identify_parents(found: Sequence[ResolvedCheckpoint]) -> dict[Path, FileIdentity]:
    """Identities of all files of the parents, which are here, for ``require_same_files``.

    Raises:
        InvalidInput: An index that is not JSON.
    """
    identities = identify_files(parent.directory for parent in found)
    for adapter in (parent.adapter for parent in found if parent.adapter):
        identities |= {path: file_identity(path) for path in map(adapter.directory.joinpath, adapter.deciding)}
    return identities


def checkpoint_digest(directory: Path, hashes: HashMemo) -> str:
    """Merkle digest over (name, size, sha256) of the files of a checkpoint that matter.

    Raises:
        InvalidInput: for a directory without any such file.
    """
    return merkle(_hashed(directory, deciding_files(directory), hashes))


def _pinned(parent: ResolvedCheckpoint, hashes: HashMemo, trusted: Collection[str]) -> PinnedCheckpoint:
    files = _hashed(parent.directory, parent.deciding, hashes)
    digest, adapter = merkle(files), None
    if parent.adapter:
        own = _adapter_files(parent.adapter, hashes)
        digest = adapted_digest(digest, merkle(own))
        adapter = PinnedAdapter(
            ref=parent.adapter.ref,
            directory=parent.adapter.directory,
            revision=parent.adapter.revision,
            files=_listed(own),
        )
    known = parent.model_dump(exclude={"snapshot", "adapter", "is_state"})
    named = f"{parent.snapshot.repo}@{parent.snapshot.commit}" if parent.snapshot else None
    return PinnedCheckpoint(
        **known, digest=digest, files=_listed(files), adapter=adapter, runs_code=named is not None and named in trusted
    )


def adapter_digest(directory: Path, hashes: HashMemo) -> str:
    """Merkle digest of the files of an adapter that matter.

    Raises:
        InvalidInput: for a directory without any.
    """
    return merkle(_adapter_files(ResolvedAdapter(ref=str(directory), directory=directory), hashes))


def adapter_files_digest(directory: Path, hashes: HashMemo) -> str:
    """As :func:`files_digest`, of an adapter: what a provenance tells of one.

    Raises:
        InvalidInput: for a directory without any.
    """
    return files_digest(dict(_listed(_adapter_files(ResolvedAdapter(ref=str(directory), directory=directory), hashes))))


def files_digest(files: Mapping[str, str]) -> str:
    """Digest of files of which only name and sha256 are known."""
    return canonical_digest({"files": files})


def _adapter_files(adapter: ResolvedAdapter, hashes: HashMemo) -> dict[str, tuple[int, str]]:
    names = adapter.deciding
    if sum(not is_own_text(name) for name in names) < 2:
        raise InvalidInput(str(adapter.directory), found="no adapter", expected="its configuration and its weights")
    return _hashed(adapter.directory, names, hashes)


def adapted_digest(model: str, adapter: str) -> str:
    """Digest of a model with an adapter applied, from those of the two."""
    return canonical_digest({"model": model, "adapter": adapter})


def _listed(files: Mapping[str, tuple[int, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, sha256) for name, (_, sha256) in sorted(files.items()))


def _hashed(directory: Path, names: Sequence[str], hashes: HashMemo) -> dict[str, tuple[int, str]]:
    """Size and sha256 by name."""
    files = {name: ((directory / name).stat().st_size, hashes.sha256(directory / name)) for name in names}
    if not files:
        raise InvalidInput(str(directory), found="no checkpoint files", expected="weights, config.json and a tokenizer")
    return files


def _locate(reference: CheckpointRef, root: Path | None, ask: AskHub) -> Located:
    model = _place(reference, root, ask, is_adapter=False)
    if isinstance(model, MergegateError) or not reference.adapter:
        return model if isinstance(model, MergegateError) else (*model, None)
    try:
        named = parse_reference(reference.adapter, f"{reference}: its adapter")
    except MergegateError as error:
        return error
    adapter = _place(named, root, ask, is_adapter=True)
    if isinstance(adapter, MergegateError):
        return adapter
    directory, snapshot = adapter
    revision = snapshot.commit if snapshot else None
    return *model, ResolvedAdapter(ref=reference.adapter, directory=directory, revision=revision, snapshot=snapshot)


def _place(
    reference: CheckpointRef, root: Path | None, ask: AskHub, *, is_adapter: bool
) -> tuple[Path, Snapshot | None] | MergegateError:
    """Of one directory or repository."""
    try:
        local = resolve_local(reference, root)
    except MergegateError as error:
        return error
    if local is not None:
        problem = None if is_adapter else without_model(reference.path, local)
        return problem or (local.resolve(), None)
    answer = ask(reference.path, reference.revision, is_adapter)
    return answer if isinstance(answer, MergegateError) else (answer.directory, answer)


def _snapshot(repo: str, revision: str | None, is_adapter: bool) -> Snapshot | MergegateError:
    try:
        return find_snapshot(repo, revision, adapter=is_adapter)
    except MergegateError as error:
        return error


def _found(
    recipe: Recipe, located: Mapping[tuple[CheckpointRef, Path | None], Located]
) -> tuple[ResolvedCheckpoint, ...]:
    references, merged, states = recipe.references(), set(recipe.merged_references()), set(recipe.states)
    found = []
    for reference, name in zip(references, _unique_names(references), strict=True):
        place = located[reference, recipe.directory]
        if isinstance(place, MergegateError):
            continue
        directory, snapshot, adapter = place
        found.append(
            ResolvedCheckpoint(
                name=name,
                ref=str(reference),
                directory=directory,
                revision=snapshot.commit if snapshot else None,
                is_base=recipe.base is not None and str(reference) == str(recipe.base),
                is_merged=reference in merged,
                is_state=str(reference) in states,
                snapshot=snapshot,
                adapter=adapter,
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
    names = [_name(reference) for reference in references]
    counts = Counter(names)
    return [name if counts[name] == 1 else str(reference) for name, reference in zip(names, references, strict=True)]


def _name(reference: CheckpointRef) -> str:
    """What a person calls it: ``reverser``, or ``base+reverser-lora``."""
    if not reference.adapter:
        return reference.name
    path = reference.adapter.partition("@")[0].rstrip("/")
    return f"{reference.name}+{path.rpartition('/')[2] or path}"

"""Resolve the model references of a recipe, and pin the files behind them by their hashes.

This takes two steps, so that inexpensive checks can reject a parent in between. First, ``resolve_parents`` turns each
reference into a directory or, on the Hub, into a commit with its small files. The checks of licenses and headers
(``open_parent``) need nothing more. After the weights are downloaded (``parent_weights.fetch_weights``),
``pin_checkpoints`` hashes each file that determines the model's behavior once (``merge_core.files.hashing``). These
hashes form the digest that all cache keys contain. The adapter of a parent ``model+adapter`` goes the same way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel

from mergegate.merge_core import Checkpoint, CheckpointRef, Recipe, open_checkpoint, resolve_local
from mergegate.merge_core.adapters import (
    Adapter,
    AdapterOwnTensor,
    CombinedSize,
    adapter_files,
    apply_adapter,
    changes_of,
    combined_size,
    is_own_text,
    open_adapter,
)
from mergegate.merge_core.checkpoint import nested_names
from mergegate.merge_core.errors import Finding, InvalidInput, MergegateError
from mergegate.merge_core.files import FileIdentity, HashMemo, file_identity
from mergegate.merge_core.recipe import expand_user_path, name_in_path, parse_reference
from mergegate.tasks.base.store import NotInKey, merkle
from mergegate.tasks.base.store import digest as canonical_digest
from mergegate.tasks.models.checkpoints.card import card_directory, quantization_in_card
from mergegate.tasks.models.checkpoints.hub.permissions import combine_hub_errors
from mergegate.tasks.models.checkpoints.hub.snapshot import Snapshot, element_reader, find_snapshot, read_snapshot
from mergegate.tasks.models.checkpoints.model import Model, deciding_files, find_model_problem
from mergegate.tasks.models.checkpoints.project_access import expect_inputs

# Where the name of a quantized model starts to differ from the name of the model: base-bnb-4bit, base-GPTQ-Int4.
_QUANTIZED_NAME = re.compile(
    r"(?:[-_.]unsloth)?[-_.](?:quantized|bnb|mlx|gptq|awq|hqq|aqlm|eetq|exl[23]|gguf|auto-?round|[1-8]-?bit"
    r"|(?:int|u?fp|nf|nvfp|mxfp)[48]|w[2-8]a(?:4|8|16)|q[2-8]_[k0-9])(?![a-z0-9])",
    re.IGNORECASE,
)


class ResolvedAdapter(BaseModel, frozen=True, extra="forbid"):
    """An adapter that has been located but not read. Its weights may still have to be downloaded from the Hub."""

    ref: str  # Text after the ``+`` in the recipe.
    directory: Path  # Directory of the adapter. For the Hub, the directory of the commit in the Hub's cache.
    revision: str | None = None  # Commit of the Hub repository, or None for a local directory.
    snapshot: Snapshot | None = None  # Files of that commit, or None for a local directory.

    @property
    def deciding(self) -> tuple[str, ...]:
        """Names of the files that determine the behavior of the adapter."""
        if self.snapshot:
            return self.snapshot.deciding
        return adapter_files(
            [*(path.name for path in self.directory.iterdir() if path.is_file()), *nested_names(self.directory)]
        )

    def open(self) -> Adapter:
        """Return the adapter, read from its configuration and its header."""
        return read_snapshot(self.snapshot, open_adapter) if self.snapshot else open_adapter(self.directory)

    def findings(self, parent: str, checkpoint: Checkpoint | None = None) -> tuple[Finding, ...]:
        """Return warnings if the adapter was trained on other weights than those of its parent, or changes nothing.

        ``parent`` is the parent's reference. ``checkpoint`` is the opened parent, in which the adapter may lack rows.
        Factors are read until one of them is not zero.
        """
        base, adapter, warnings = parent.partition("+")[0], self.open(), list[tuple[str, str, str, str]]()
        named, where = adapter.config.base, f"{adapter.config.location}: base_model_name_or_path"
        name, base_name = name_in_path(named), name_in_path(base.partition("@")[0])
        is_quantized = _QUANTIZED_NAME.search(name) is not None
        words = "" if is_quantized else quantization_in_card(card_directory(self.directory))
        if words or (is_quantized and name != base_name):
            model = f"a quantized copy of {named or base} ({words})" if words else f"the quantized model {named}"
            found = f"trained on {model}. It also corrects rounding errors that {base} lacks, so the merge differs"
            expected = f"an adapter that was trained on {base}, to which it is applied"
            remedy = "evaluate the merge, or apply the adapter to a dequantized copy (transformers: model.dequantize())"
            warnings.append((where, f"{found} from the model that was trained", expected, remedy))
        if named and base_name not in (name, _QUANTIZED_NAME.split(name)[0]):
            remedy = "make sure that the adapter was trained on these weights. mergegate can only compare shapes"
            warnings.append((where, named, f"{base}, to which the adapter is applied", remedy))
        if adapter.has_zero_factors(element_reader(self.snapshot)):
            found, expected = "each module has a factor of zeros, which changes nothing", "trained factors"
            remedy = "make sure that the adapter was trained and saved completely, or remove it from the recipe"
            warnings.append((str(adapter.directory), found, expected, remedy))
        findings = [Finding("warn", *texts, cause=texts[1]) for texts in warnings]
        for tensor in checkpoint.tensors.values() if checkpoint else ():
            if isinstance(tensor, AdapterOwnTensor) and tensor.own.shape != tensor.shape:
                found = (
                    f"the adapter has {tensor.own.shape[0]} of {tensor.shape[0]} rows. The other rows, which belong to"
                )
                findings.append(Finding("info", f"{parent}: {tensor.name}", f"{found} no token, stay those of {base}"))
        return tuple(findings)


class PinnedAdapter(BaseModel, frozen=True, extra="forbid"):
    """An adapter whose files are pinned by their hashes."""

    ref: str
    directory: Path
    revision: str | None
    files: tuple[tuple[str, str], ...]  # name and sha256

    def pinned_files(self) -> dict[Path, str]:
        """Return the sha256 of each file of the adapter, by path."""
        return {self.directory / name: sha256 for name, sha256 in self.files}


# Function of repository, revision and "is an adapter" that returns the snapshot, or the reason why there is none.
FindSnapshot = Callable[[str, str | None, bool], Snapshot | MergegateError]


class ResolvedCheckpoint(BaseModel, frozen=True, extra="forbid"):
    """A parent that has been located but not read. Its weights may still have to be downloaded from the Hub."""

    name: str  # Unique in the run.
    ref: str  # Reference in the recipe.
    directory: Annotated[Path, NotInKey]
    revision: str | None = None  # Commit of a Hub repository, or None for a local directory.
    is_base: bool = False
    is_merged: Annotated[bool, NotInKey] = True  # Whether its weights are merged, see ``Recipe.merged_references``.
    snapshot: Annotated[Snapshot | None, NotInKey] = None  # Files of the commit, or None for a local directory.
    adapter: Annotated[ResolvedAdapter | None, NotInKey] = None  # Adapter that is applied to the model.

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Snapshots of those of the model and its adapter that are on the Hub."""
        both = (self.snapshot, self.adapter.snapshot if self.adapter else None)
        return tuple(snapshot for snapshot in both if snapshot)

    @property
    def directories(self) -> tuple[Path, ...]:
        """Directory of the model and, if there is one, of its adapter."""
        return (self.directory, self.adapter.directory) if self.adapter else (self.directory,)

    @property
    def deciding(self) -> tuple[str, ...]:
        """Names of the files that determine the behavior of the model, without its adapter."""
        return self.snapshot.deciding if self.snapshot else deciding_files(self.directory)


class PinnedCheckpoint(Model):
    """A pinned parent of the merge.

    Cache keys contain the parent's digest but not its name, so a renamed parent is not evaluated again.
    """

    ref: Annotated[str, NotInKey]  # Reference that the merge engine uses for the parent.
    revision: Annotated[str | None, NotInKey] = None
    is_base: Annotated[bool, NotInKey] = False
    is_merged: Annotated[bool, NotInKey] = True
    adapter: Annotated[PinnedAdapter | None, NotInKey] = None  # Adapter that is applied. The digest covers it.

    def pinned_files(self) -> Mapping[Path, str]:
        return {**super().pinned_files(), **(self.adapter.pinned_files() if self.adapter else {})}

    def present(self) -> Iterable[Path]:
        return (*super().present(), *(self.adapter.pinned_files() if self.adapter else ()))

    @property
    def directories(self) -> tuple[Path, ...]:
        """Directory of the model and, if there is one, of its adapter."""
        return (self.directory, self.adapter.directory) if self.adapter else (self.directory,)

    def rename(self, rename: Callable[[str], str]) -> PinnedCheckpoint:
        """Return the parent with ``rename`` applied to its name, its reference and the reference of its adapter."""
        adapter = self.adapter and self.adapter.model_copy(update={"ref": rename(self.adapter.ref)})
        return self.model_copy(update={"name": rename(self.name), "ref": rename(self.ref), "adapter": adapter})

    def open(self) -> Checkpoint:
        """Return the checkpoint with its adapter applied, read from the local configuration and headers."""
        model = open_checkpoint(self.directory)
        return apply_adapter(model, open_adapter(self.adapter.directory)) if self.adapter else model


@dataclass(frozen=True)
class PinnedRecipe:
    """A recipe that is identified by the content of its parents instead of their names or directories."""

    recipe: Recipe
    parents: tuple[PinnedCheckpoint, ...]

    def content_key(self) -> object:
        return _substitute(self.recipe.canonical(), {parent.ref: parent.digest for parent in self.parents})


@dataclass(frozen=True)
class ParentSearch:
    """Result of searching for the parents of several recipes."""

    # Resolved parents of each recipe, in the order in which the recipe names them.
    parents: tuple[tuple[ResolvedCheckpoint, ...], ...]
    problems: tuple[MergegateError, ...]  # One error for each reference that could not be resolved.


def search_parents(recipes: Sequence[Recipe]) -> ParentSearch:
    """Resolve all references in the recipes. Local paths are relative to the directory of the recipe.

    Each reference is resolved once, so all recipes get the same commit of a branch, even if it moves during the search.
    """
    find = cache(_find_snapshot_or_error)
    located: dict[tuple[CheckpointRef, Path | None], dict[str, Any]] = {}
    problems: dict[tuple[CheckpointRef, Path | None], MergegateError] = {}
    for key in dict.fromkeys((reference, recipe.directory) for recipe in recipes for reference in recipe.references()):
        try:
            located[key] = _locate(*key, find)
        except MergegateError as error:
            problems[key] = error
    parents_of_recipes = []
    for recipe in recipes:
        references, merged = recipe.references(), set(recipe.merged_references())
        parents = []
        counts = Counter(map(_name, references))
        for reference in references:
            if (reference, recipe.directory) in located:
                parents.append(
                    ResolvedCheckpoint(
                        # A name that is not unique is replaced by the full reference.
                        name=_name(reference) if counts[_name(reference)] == 1 else str(reference),
                        ref=str(reference),
                        is_base=recipe.base is not None and str(reference) == str(recipe.base),
                        is_merged=reference in merged,
                        **located[reference, recipe.directory],
                    )
                )
        expect_inputs(parents)
        parents_of_recipes.append(tuple(parents))
    return ParentSearch(tuple(parents_of_recipes), tuple(problems.values()))


def resolve_parents(recipe: Recipe) -> tuple[ResolvedCheckpoint, ...]:
    """Return the parents that a recipe names, in recipe order. See :func:`resolve_all_parents`."""
    return resolve_all_parents([recipe])[0]


def find_checkpoint(text: str) -> ResolvedCheckpoint:
    """Return the checkpoint that ``text`` names: a local directory or ``org/name@revision``."""
    # The name of a directory may contain @ or +.
    reference = CheckpointRef(text) if expand_user_path(text).is_dir() else parse_reference(text, text)
    location = _locate(reference, None, _find_snapshot_or_error)
    return ResolvedCheckpoint(name=_name(reference), ref=text, **location)


def resolve_all_parents(recipes: Sequence[Recipe]) -> tuple[tuple[ResolvedCheckpoint, ...], ...]:
    """Return the parents of each recipe. Local paths are relative to its directory, and branches resolve once for all.

    Raises:
        InvalidInput: A reference is neither a local directory nor a repository.
        Refused: The Hub denies access to a repository or is not reachable.
    """
    search = search_parents(recipes)
    if search.problems:
        raise combine_hub_errors(search.problems)
    return search.parents


def open_parent(parent: ResolvedCheckpoint) -> Checkpoint:
    """Return the checkpoint of a parent with its adapter applied, even if its weights are not downloaded yet."""
    model = _open_base(parent)
    return apply_adapter(model, parent.adapter.open()) if parent.adapter else model


def adapter_findings_of_parents(
    parents: Sequence[ResolvedCheckpoint], checkpoints: Mapping[str, Checkpoint]
) -> tuple[Finding, ...]:
    """Return the findings about the adapters of parents. ``checkpoints`` are the opened parents by reference."""
    adapted = [(parent.ref, parent.adapter) for parent in parents if parent.adapter]
    return tuple(finding for ref, adapter in adapted for finding in adapter.findings(ref, checkpoints[ref]))


def require_combinable(recipe: Recipe, parents: Sequence[ResolvedCheckpoint]) -> None:
    """Raise an error if the recipe produces an adapter but the adapters of the parents cannot be combined."""
    if recipe.output is None:
        return
    for parent in parents:
        if parent.adapter:
            changes_of(parent.ref, _open_base(parent), parent.adapter.open(), is_local=False)


def size_of_adapter(recipe: Recipe, parents: Sequence[ResolvedCheckpoint]) -> CombinedSize | None:
    """Return the size of the adapter that the recipe produces, read from headers, or None if it produces a model."""
    adapted = {parent.ref: parent for parent in parents if parent.adapter}
    if recipe.output is None or not adapted:
        return None
    base = _open_base(next(iter(adapted.values())))
    return combined_size(
        recipe, base, {ref: parent.adapter.open() for ref, parent in adapted.items() if parent.adapter}
    )


def _open_base(parent: ResolvedCheckpoint) -> Checkpoint:
    """Return the checkpoint of a parent without its adapter, read from headers."""
    return read_snapshot(parent.snapshot, open_checkpoint) if parent.snapshot else open_checkpoint(parent.directory)


def pin_checkpoints(
    parents: Sequence[ResolvedCheckpoint], hashes: HashMemo, trusted_repositories: Collection[str] = ()
) -> tuple[PinnedCheckpoint, ...]:
    """Hash the files of the parents, which must be on this machine, and return the pinned parents.

    A parent may run its own code if ``trusted_repositories`` contains its commit, as ``org/name@<40 hex digits>``.
    """
    pinned = []
    for parent in parents:
        files = _hash_files(parent.directory, parent.deciding, hashes)
        digest, adapter = merkle(files), None
        if parent.adapter:
            adapter_files = _hash_adapter_files(parent.adapter, hashes)
            digest = adapted_digest(digest, merkle(adapter_files))
            fields = parent.adapter.model_dump(exclude={"snapshot"})
            adapter = PinnedAdapter(**fields, files=_names_and_hashes(adapter_files))
        repo_at_commit = f"{parent.snapshot.repo}@{parent.snapshot.commit}" if parent.snapshot else None
        pinned.append(
            PinnedCheckpoint(
                **parent.model_dump(exclude={"snapshot", "adapter"}),
                digest=digest,
                files=_names_and_hashes(files),
                adapter=adapter,
                runs_code=repo_at_commit is not None and repo_at_commit in trusted_repositories,
            )
        )
    expect_inputs(pinned)
    return tuple(pinned)


def find_pinned_checkpoints(parents: Sequence[ResolvedCheckpoint], hashes: HashMemo) -> tuple[PinnedCheckpoint, ...]:
    """Return the parents whose file hashes are all known, in pinned form, without hashing any file."""
    pinned: list[PinnedCheckpoint] = []
    for parent in parents:
        paths = [parent.directory / name for name in parent.deciding]
        if parent.adapter:
            paths += [parent.adapter.directory / name for name in parent.adapter.deciding]
        if paths and all(hashes.recall(path) for path in paths):
            pinned += pin_checkpoints([parent], hashes)
    return tuple(pinned)


def identify_parents(parents: Sequence[ResolvedCheckpoint]) -> dict[Path, FileIdentity]:
    """Return the identities of all files of the parents, which must be on this machine, for ``require_same_files``."""
    paths = [parent.directory / name for parent in parents for name in deciding_files(parent.directory)]
    for adapter in (parent.adapter for parent in parents if parent.adapter):
        paths += map(adapter.directory.joinpath, adapter.deciding)
    return {path: file_identity(path) for path in paths}


def checkpoint_digest(directory: Path, hashes: HashMemo) -> str:
    """Return a Merkle digest of the name, size and sha256 of each file that determines the checkpoint's behavior."""
    return merkle(_hash_files(directory, deciding_files(directory), hashes))


def adapter_digest(directory: Path, hashes: HashMemo) -> str:
    """Return a Merkle digest of the name, size and sha256 of each file that determines the adapter's behavior."""
    return merkle(_hash_adapter_files(ResolvedAdapter(ref=str(directory), directory=directory), hashes))


def adapter_files_digest(directory: Path, hashes: HashMemo) -> str:
    """Return the :func:`files_digest` of an adapter, which the provenance of a release records."""
    adapter = ResolvedAdapter(ref=str(directory), directory=directory)
    return files_digest(dict(_names_and_hashes(_hash_adapter_files(adapter, hashes))))


def files_digest(files: Mapping[str, str]) -> str:
    """Return one digest of all file names and sha256 hashes in ``files``, which maps each name to its hash."""
    return canonical_digest({"files": files})


def _hash_adapter_files(adapter: ResolvedAdapter, hashes: HashMemo) -> dict[str, tuple[int, str]]:
    names = adapter.deciding
    if sum(not is_own_text(name) for name in names) < 2:
        raise InvalidInput(
            str(adapter.directory), found="the adapter is incomplete", expected="its configuration and its weights"
        )
    return _hash_files(adapter.directory, names, hashes)


def adapted_digest(model: str, adapter: str) -> str:
    """Return the digest of a model with an adapter applied, computed from their two digests."""
    return canonical_digest({"model": model, "adapter": adapter})


def _names_and_hashes(files: Mapping[str, tuple[int, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, sha256) for name, (_, sha256) in sorted(files.items()))


def _hash_files(directory: Path, names: Sequence[str], hashes: HashMemo) -> dict[str, tuple[int, str]]:
    """Return the size and the sha256 of each file, by name."""
    files = {name: ((directory / name).stat().st_size, hashes.sha256(directory / name)) for name in names}
    if not files:
        raise InvalidInput(
            str(directory), found="it has no checkpoint files", expected="weights, config.json and a tokenizer"
        )
    return files


def _locate(reference: CheckpointRef, root: Path | None, find: FindSnapshot) -> dict[str, Any]:
    """Return directory, revision, snapshot and adapter of a reference."""
    location = _locate_repository(reference, root, find, is_adapter=False)
    if not reference.adapter:
        return location
    adapter_reference = parse_reference(reference.adapter, f"{reference}: its adapter")
    adapter = _locate_repository(adapter_reference, root, find, is_adapter=True)
    return {**location, "adapter": ResolvedAdapter(ref=reference.adapter, **adapter)}


def _locate_repository(
    reference: CheckpointRef, root: Path | None, find: FindSnapshot, *, is_adapter: bool
) -> dict[str, Any]:
    if (local := resolve_local(reference, root)) is not None:
        if not is_adapter and (problem := find_model_problem(reference.path, local)):
            raise problem
        return {"directory": local.resolve()}
    snapshot = find(reference.path, reference.revision, is_adapter)
    if isinstance(snapshot, MergegateError):
        raise snapshot
    return {"directory": snapshot.directory, "revision": snapshot.commit, "snapshot": snapshot}


def _find_snapshot_or_error(repo: str, revision: str | None, is_adapter: bool) -> Snapshot | MergegateError:
    # An error is returned, not raised, so that it is cached as well.
    try:
        return find_snapshot(repo, revision, adapter=is_adapter)
    except MergegateError as error:
        return error


def _substitute(value: object, digests: Mapping[str, str]) -> object:
    """Return ``value`` with every reference in it replaced by its digest."""
    if isinstance(value, str):
        return digests.get(value, value)
    if isinstance(value, Mapping):
        return {digests.get(key, key): _substitute(inner, digests) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_substitute(inner, digests) for inner in value]
    return value


def _name(reference: CheckpointRef) -> str:
    """Return the display name, for example ``reverser`` or ``base+reverser-lora``."""
    if not reference.adapter:
        return reference.name
    path = reference.adapter.partition("@")[0].rstrip("/")
    return f"{reference.name}+{path.rpartition('/')[2] or path}"

"""Rebuild the weights of a release from its recipe and its parents, and compare them byte by byte.

A release does not contain local paths. A parent on the Hub is downloaded at the commit in the provenance. A local
parent is searched at the path in the recipe, relative to every recipe file with the same content below the working
directory. It is used only if its digest is the one in the provenance. The device is of the kind in the provenance, if
this machine has one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from mergegate.merge_core import (
    Checkpoint,
    CheckpointRef,
    Recipe,
    load_recipe,
    merge_weights,
    open_checkpoint,
    plan_merge,
    resolve_local,
)
from mergegate.merge_core.adapters import apply_adapter, open_adapter
from mergegate.merge_core.architecture.experts import match_experts
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import read_plain
from mergegate.merge_core.recipe import parse_reference
from mergegate.tasks.checkpoints import (
    PinnedCheckpoint,
    ResolvedAdapter,
    ResolvedCheckpoint,
    adapted_digest,
    adapter_digest,
    checkpoint_digest,
    pin_checkpoints,
)
from mergegate.tasks.checkpoints.hub import download_snapshots, find_snapshot
from mergegate.tasks.merge import combine_parents, prepare_recipe
from mergegate.tasks.publish import PROVENANCE, RECIPE
from mergegate.tasks.publish.releases.verify import Files, VerifiedRelease
from mergegate.tasks.publish.targets import PublishedRelease
from mergegate.tasks.stage import device_kind, versions

_WEIGHTS = ".safetensors"
_DECIDING_LIBRARIES = ("torch", "numba")  # their versions may change the last digit of a result
_NOT_SEARCHED = frozenset({"node_modules", "site-packages", "__pycache__"})
_RECIPES = (".yaml", ".yml")


@dataclass(frozen=True)
class ReproducedRelease:
    """A release that was rebuilt byte for byte."""

    where: str
    files: tuple[str, ...]  # rebuilt files, all identical
    bytes: int
    seconds: float
    device: str


def rebuild_release(
    release: PublishedRelease,
    verified: VerifiedRelease,
    out: Path,
    hashes: HashMemo,
    *,
    directory: Path | None = None,
    device: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
) -> ReproducedRelease:
    """Merge again into ``out``, an empty directory, and compare every file with the release.

    Args:
        verified: Result of verifying the release. Only a consistent release is worth rebuilding.
        directory: Base of relative paths in the recipe. None: mergegate searches for it.
        device: auto, cpu, cuda or cuda:N. auto: the kind of device that built the release if available, or else cpu.

    Raises:
        InvalidInput: A parent is missing or differs from the one in the provenance.
        Refused: The Hub cannot deliver a parent, or the rebuilt files differ from the release.
    """
    build = _build(release, verified)
    text = release.read(RECIPE)
    recipe = load_recipe(text.decode(), location=f"{release.where}: {RECIPE}")
    digests = {parent.name: parent for parent in build.resolved_dependencies}
    directories = [directory] if directory else [*_directories_with_recipe(text), Path.cwd()]
    parents = _parents(recipe.references(), digests, directories, hashes)
    recipe = replace(recipe, directory=_find_text_directory(recipe, directories, digests, hashes))
    recipe = prepare_recipe(recipe, lambda ref: _pinned(ref, parents[ref], hashes))
    parameters = build.internal_parameters
    device = _device(parameters.device) if device == "auto" else device
    started = time.monotonic()
    if recipe.output:
        adapters = [(ref, model, adapter) for ref, (model, adapter) in parents.items() if adapter]
        combine_parents(recipe, adapters, out, seed=parameters.seeds.merge, on_progress=on_progress or _no_progress)
    else:
        matched = match_experts(recipe, {ref: _opened(*place) for ref, place in parents.items()})
        plan = plan_merge(matched.recipe, matched.checkpoints)
        merge_weights(plan, out, seed=parameters.seeds.merge, device=device, on_progress=on_progress)
    seconds = time.monotonic() - started
    rebuilt = {
        path.relative_to(out).as_posix(): (path.stat().st_size, hashes.sha256(path, trust=False))
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    _require_equal(verified, rebuilt, parameters, device)
    return ReproducedRelease(release.where, tuple(rebuilt), sum(size for size, _ in rebuilt.values()), seconds, device)


class _ProvenancePart(BaseModel):
    """A part of the provenance, with the fields that a rebuild needs."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel)


class _Digest(_ProvenancePart):
    sha256: str
    git_commit: str | None = None


class _Adapter(_ProvenancePart):
    git_commit: str | None = None


class _Annotations(_ProvenancePart):
    adapter: _Adapter = _Adapter()


class _Dependency(_ProvenancePart):
    name: str
    digest: _Digest
    annotations: _Annotations = _Annotations()


class _Seeds(_ProvenancePart):
    merge: int = Field(ge=0)


class _BuildParameters(_ProvenancePart):
    device: str
    versions: dict[str, str]
    seeds: _Seeds


class _Build(_ProvenancePart):
    internal_parameters: _BuildParameters
    resolved_dependencies: tuple[_Dependency, ...]


def _build(release: PublishedRelease, verified: VerifiedRelease) -> _Build:
    try:
        return _Build.model_validate(verified.statement["predicate"]["buildDefinition"])
    except (ValidationError, KeyError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (error.args[0],), "msg": "missing"}
        raise Refused(
            f"{release.where}: {PROVENANCE}: {'.'.join(map(str, first['loc']))}",
            found=str(first["msg"]),
            expected="what this version of mergegate writes there",
            remedy="reproduce it with the version of mergegate that made it",
        ) from None


def _find_text_directory(
    recipe: Recipe, directories: Sequence[Path], dependencies: Mapping[str, _Dependency], hashes: HashMemo
) -> Path | None:
    """Return the directory of the texts that the models read, verified by hash. None: the recipe has no texts.

    Raises:
        InvalidInput: A text is missing or has changed.
    """
    texts = {text for document in (*recipe.steps, recipe) for text in document.texts.values()}
    if not texts:
        return None
    for directory in directories:
        if all((directory / text).is_file() for text in texts):
            for text in sorted(texts):
                if text not in dependencies or hashes.sha256(directory / text) != dependencies[text].digest.sha256:
                    raise InvalidInput(
                        str(directory / text),
                        found="another text than the provenance names",
                        expected="what the models read when the release was made",
                        remedy="restore it, or name with --parents the directory that it lies in",
                    )
            return directory
    raise InvalidInput(
        sorted(texts)[0],
        found="not there",
        expected="the text that a model read for this merge, where the recipe says",
        remedy="name with --parents the directory that the recipe's paths are relative to",
    )


def _pinned(ref: str, directories: tuple[Path, Path | None], hashes: HashMemo) -> PinnedCheckpoint:
    """Return a parent, with its adapter, as a pinned checkpoint."""
    model, adapter = directories
    applied = ResolvedAdapter(ref=ref, directory=adapter) if adapter else None
    return pin_checkpoints([ResolvedCheckpoint(name=ref, ref=ref, directory=model, adapter=applied)], hashes)[0]


def _device(kind: str) -> str:
    """Return the kind of device that built the release, or cpu if this machine has none."""
    return kind if kind == "cpu" or device_kind() == kind else "cpu"


def _require_equal(verified: VerifiedRelease, rebuilt: Files, parameters: _BuildParameters, device: str) -> None:
    released = verified.listing
    weights = {name for name in released if name.endswith(_WEIGHTS)}
    names = weights | set(rebuilt)
    different = sorted(name for name in names if rebuilt.get(name) != released.get(name))
    if not different:
        return
    raise Refused(
        f"{verified.where}: {different[0]}",
        found=f"made again, {len(different)} of {len(names)} files are others: {', '.join(different[:5])}",
        expected="the same bytes",
        remedy=_remedy(parameters, device),
    )


def _remedy(parameters: _BuildParameters, device: str) -> str:
    """Describe the most telling difference between the original build and this one."""
    kind, used, installed = parameters.device, parameters.versions, versions(*_DECIDING_LIBRARIES)
    if kind != device.partition(":")[0]:
        return f"it was made on {kind}, and again on {device}: use --device {kind}, on a machine that has one"
    changes = [
        f"{name} {used[name]} (here {installed[name]})"
        for name in _DECIDING_LIBRARIES
        if used.get(name, installed[name]) != installed[name]
    ]
    if changes:
        return f"it was made with {', '.join(changes)}: use those versions"
    return "nothing else differs: do not use it; its weights are not what its recipe gives"


def _parents(
    references: Sequence[CheckpointRef],
    dependencies: Mapping[str, _Dependency],
    directories: Sequence[Path],
    hashes: HashMemo,
) -> dict[str, tuple[Path, Path | None]]:
    """Return the verified directories of every parent and its adapter, by the name in the recipe."""
    parents: dict[str, tuple[Path, Path | None]] = {}
    for reference in references:
        name = str(reference)
        dependency = dependencies.get(name)
        if dependency is None:
            raise InvalidInput(name, found="the provenance does not name it", expected="every parent of the recipe")
        digest, actual = dependency.digest, None
        for model, adapter in _candidate_directories(reference, dependency, directories, hashes):
            actual = checkpoint_digest(model, hashes)
            if adapter is not None:
                actual = adapted_digest(actual, adapter_digest(adapter, hashes))
            if actual == digest.sha256:
                parents[name] = model, adapter
                break
        else:
            raise InvalidInput(
                name,
                found=f"a checkpoint with the digest {actual[:16]}" if actual else "no such directory",
                expected=f"the checkpoint {digest.sha256[:16]} that was merged",
                remedy=f"pass --parents DIR with the merged checkpoint at DIR/{name.lstrip('/')}; "
                "a release names local models relative to DIR",
            )
    return parents


def _opened(model: Path, adapter: Path | None) -> Checkpoint:
    opened = open_checkpoint(model)
    return opened if adapter is None else apply_adapter(opened, open_adapter(adapter))


def _no_progress(done: int, total: int) -> None:
    """Ignore progress."""


def _candidate_directories(
    reference: CheckpointRef, dependency: _Dependency, directories: Sequence[Path], hashes: HashMemo
) -> Iterator[tuple[Path, Path | None]]:
    """Yield the directories that may contain a parent and its adapter."""
    models = _downloaded_or_local(reference, dependency.digest.git_commit, directories, hashes, is_adapter=False)
    if not reference.adapter:
        yield from ((model, None) for model in models)
        return
    adapter_reference, commit = (
        parse_reference(reference.adapter, str(reference)),
        dependency.annotations.adapter.git_commit,
    )
    adapters = list(_downloaded_or_local(adapter_reference, commit, directories, hashes, is_adapter=True))
    yield from ((model, adapter) for model in models for adapter in adapters)


def _downloaded_or_local(
    reference: CheckpointRef, commit: str | None, directories: Sequence[Path], hashes: HashMemo, *, is_adapter: bool
) -> Iterator[Path]:
    if commit:
        yield _download(reference.path, commit, hashes, is_adapter)
    else:
        yield from _local(reference, directories)


def _local(reference: CheckpointRef, directories: Sequence[Path]) -> Iterator[Path]:
    for base in directories:
        try:
            directory = resolve_local(reference, base)
        except InvalidInput:
            continue
        if directory is not None:
            yield directory


def _directories_with_recipe(recipe: bytes) -> Iterator[Path]:
    """Yield directories below the working directory that contain a recipe with this content, except releases."""
    for top, folders, names in os.walk(Path.cwd()):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _NOT_SEARCHED)
        directory = Path(top)
        for name in sorted(names):
            file = directory / name
            if name == RECIPE or not name.endswith(_RECIPES):
                continue
            with suppress(InvalidInput, OSError):  # skip files that cannot be read or are larger
                if read_plain(file, len(recipe)) == recipe:
                    yield directory


def _download(repo: str, commit: str, hashes: HashMemo, is_adapter: bool) -> Path:
    """Download the files of a parent at a commit, verified against the Hub's listing."""
    snapshot = find_snapshot(repo, commit, adapter=is_adapter)
    download_snapshots([snapshot], hashes)
    return snapshot.directory

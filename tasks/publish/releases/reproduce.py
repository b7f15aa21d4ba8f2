"""Make the weights of a release again, from its recipe and its parents alone, and compare them to the byte.

The release holds no paths of the machine that made it. A parent on the Hub is fetched at the commit that the provenance
names; a local one is looked for where the recipe says, beside a recipe file with the same content below the working
directory, and is believed only when its digest is the one in the provenance. The device is of the kind that the
provenance names, where this machine has one.
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
_DECIDING_LIBRARIES = ("torch", "numba")  # the last place of a number, besides recipe and parents
_NOT_SEARCHED = frozenset({"node_modules", "site-packages", "__pycache__"})
_RECIPES = (".yaml", ".yml")


@dataclass(frozen=True)
class ReproducedRelease:
    """A release that was made again, byte for byte."""

    where: str
    files: tuple[str, ...]  # that were made again and are equal
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
    """Merge again into ``out``, an empty directory, and compare every file with that of the release.

    Args:
        verified: What ``verify`` said of the release: only what agrees with itself is worth making again.
        directory: What relative paths of the recipe are relative to; None: looked for.
        device: auto, cpu, cuda or cuda:N. auto: as the release was made, else what there is.

    Raises:
        InvalidInput: when a parent is not to be found, or is not the one of the provenance any more.
        Refused: when a parent cannot be had from the Hub, or what comes out is not what was released.
    """
    build = _build(release, verified)
    text = release.read(RECIPE)
    recipe = load_recipe(text.decode(), where=f"{release.where}: {RECIPE}")
    digests = {parent.name: parent for parent in build.resolved_dependencies}
    starts = [directory] if directory else [*_beside_same(text), Path.cwd()]
    places = _parents(recipe.references(), digests, starts, hashes)
    recipe = replace(recipe, directory=_beside_texts(recipe, starts, digests, hashes))
    recipe = prepare_recipe(recipe, lambda ref: _pinned(ref, places[ref], hashes))
    made_by = build.internal_parameters
    device = _device(made_by.device) if device == "auto" else device
    began = time.monotonic()
    if recipe.output:
        adapters = [(ref, model, adapter) for ref, (model, adapter) in places.items() if adapter]
        combine_parents(recipe, adapters, out, seed=made_by.seeds.merge, on_progress=on_progress or _no_progress)
    else:
        matched = match_experts(recipe, {ref: _opened(*place) for ref, place in places.items()})
        plan = plan_merge(matched.recipe, matched.checkpoints)
        merge_weights(plan, out, seed=made_by.seeds.merge, device=device, on_progress=on_progress)
    seconds = time.monotonic() - began
    made = {
        path.relative_to(out).as_posix(): (path.stat().st_size, hashes.sha256(path, trust=False))
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    _require_equal(verified, made, made_by, device)
    return ReproducedRelease(release.where, tuple(made), sum(size for size, _ in made.values()), seconds, device)


class _ProvenancePart(BaseModel):
    """A part of the provenance, as far as it is needed here."""

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


def _beside_texts(
    recipe: Recipe, starts: Sequence[Path], dependencies: Mapping[str, _Dependency], hashes: HashMemo
) -> Path | None:
    """Where the texts lie that its models read, as they were read; None where it reads none.

    Raises:
        InvalidInput: They are not there, or are others now.
    """
    written = {text for document in (*recipe.steps, recipe) for text in document.texts.values()}
    if not written:
        return None
    for start in starts:
        if all((start / text).is_file() for text in written):
            for text in sorted(written):
                if text not in dependencies or hashes.sha256(start / text) != dependencies[text].digest.sha256:
                    raise InvalidInput(
                        str(start / text),
                        found="another text than the provenance names",
                        expected="what the models read when the release was made",
                        remedy="restore it, or name with --parents the directory that it lies in",
                    )
            return start
    raise InvalidInput(
        sorted(written)[0],
        found="not there",
        expected="the text that a model read for this merge, where the recipe says",
        remedy="name with --parents the directory that the recipe's paths are relative to",
    )


def _pinned(ref: str, place: tuple[Path, Path | None], hashes: HashMemo) -> PinnedCheckpoint:
    """A parent, with its adapter, where it was found."""
    model, adapter = place
    applied = ResolvedAdapter(ref=ref, directory=adapter) if adapter else None
    return pin_checkpoints([ResolvedCheckpoint(name=ref, ref=ref, directory=model, adapter=applied)], hashes)[0]


def _device(made_on: str) -> str:
    """The kind of device that the release was made on, unless there is none here."""
    return made_on if made_on == "cpu" or device_kind() == made_on else "cpu"


def _require_equal(verified: VerifiedRelease, made: Files, made_by: _BuildParameters, device: str) -> None:
    released = verified.listing
    weights = {name for name in released if name.endswith(_WEIGHTS)}
    other = sorted(name for name in weights | set(made) if made.get(name) != released.get(name))
    if not other:
        return
    raise Refused(
        f"{verified.where}: {other[0]}",
        found=f"made again, {len(other)} of {len(weights | set(made))} files are others: {', '.join(other[:5])}",
        expected="the same bytes",
        remedy=_remedy(made_by, device),
    )


def _remedy(made_by: _BuildParameters, device: str) -> str:
    """What differs from how it was made, most telling first."""
    made_on, made_with, here = made_by.device, made_by.versions, versions(*_DECIDING_LIBRARIES)
    if made_on != device.partition(":")[0]:
        return f"it was made on {made_on}, and again on {device}: use --device {made_on}, on a machine that has one"
    moved = [
        f"{name} {made_with[name]} (here {here[name]})"
        for name in _DECIDING_LIBRARIES
        if made_with.get(name, here[name]) != here[name]
    ]
    if moved:
        return f"it was made with {', '.join(moved)}: use those versions"
    return "nothing else differs: do not use it; its weights are not what its recipe gives"


def _parents(
    references: Sequence[CheckpointRef],
    dependencies: Mapping[str, _Dependency],
    starts: Sequence[Path],
    hashes: HashMemo,
) -> dict[str, tuple[Path, Path | None]]:
    """The directory of every parent, and of its adapter, by its name in the recipe; compared with the provenance."""
    found: dict[str, tuple[Path, Path | None]] = {}
    for reference in references:
        name = str(reference)
        dependency = dependencies.get(name)
        if dependency is None:
            raise InvalidInput(name, found="the provenance does not name it", expected="every parent of the recipe")
        digest, seen = dependency.digest, None
        for place, adapter in _places(reference, dependency, starts, hashes):
            seen = checkpoint_digest(place, hashes)
            if adapter is not None:
                seen = adapted_digest(seen, adapter_digest(adapter, hashes))
            if seen == digest.sha256:
                found[name] = place, adapter
                break
        else:
            raise InvalidInput(
                name,
                found=f"a checkpoint with the digest {seen[:16]}" if seen else "no such directory",
                expected=f"the checkpoint {digest.sha256[:16]} that was merged",
                remedy=f"pass --parents DIR with the merged checkpoint at DIR/{name.lstrip('/')}; "
                "a release names local models relative to DIR",
            )
    return found


def _opened(model: Path, adapter: Path | None) -> Checkpoint:
    opened = open_checkpoint(model)
    return opened if adapter is None else apply_adapter(opened, open_adapter(adapter))


def _no_progress(done: int, total: int) -> None:
    """Nobody watches."""


def _places(
    reference: CheckpointRef, dependency: _Dependency, starts: Sequence[Path], hashes: HashMemo
) -> Iterator[tuple[Path, Path | None]]:
    """Where a parent may lie, with its adapter, if it has one."""
    models = _downloaded_or_local(reference, dependency.digest.git_commit, starts, hashes, is_adapter=False)
    if not reference.adapter:
        yield from ((model, None) for model in models)
        return
    named, commit = parse_reference(reference.adapter, str(reference)), dependency.annotations.adapter.git_commit
    adapters = list(_downloaded_or_local(named, commit, starts, hashes, is_adapter=True))
    yield from ((model, adapter) for model in models for adapter in adapters)


def _downloaded_or_local(
    reference: CheckpointRef, commit: str | None, starts: Sequence[Path], hashes: HashMemo, *, is_adapter: bool
) -> Iterator[Path]:
    if commit:
        yield _download(reference.path, commit, hashes, is_adapter)
    else:
        yield from _local(reference, starts)


def _local(reference: CheckpointRef, starts: Sequence[Path]) -> Iterator[Path]:
    for start in starts:
        try:
            place = resolve_local(reference, start)
        except InvalidInput:
            continue
        if place is not None:
            yield place


def _beside_same(recipe: bytes) -> Iterator[Path]:
    """Directories below the working directory that hold a recipe with this very content, releases left out."""
    for top, folders, names in os.walk(Path.cwd()):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _NOT_SEARCHED)
        place = Path(top)
        for name in sorted(names):
            file = place / name
            if name == RECIPE or not name.endswith(_RECIPES):
                continue
            with suppress(InvalidInput, OSError):  # a file that cannot be read, or is larger
                if read_plain(file, len(recipe)) == recipe:
                    yield place


def _download(repo: str, commit: str, hashes: HashMemo, is_adapter: bool) -> Path:
    """The files that count of a parent on the Hub, at this commit, each as the Hub lists it."""
    snapshot = find_snapshot(repo, commit, adapter=is_adapter)
    download_snapshots([snapshot], hashes)
    return snapshot.directory

"""Rebuild the weights of a release, and compare them byte by byte.

The weights of a merge are rebuilt from its recipe and its parents. A release does not contain local paths. A parent on
the Hub is downloaded at the commit in the provenance. For a local parent, mergegate searches the working directory for
copies of the recipe, and tries the path in the recipe relative to each of them. It uses the parent only if its digest
is the one in the provenance.

Variants are quantized again from the release of their merge. The tools must be installed in this project, and their
versions decide the bytes. mergegate verifies both releases, and gives the quantizer a directory with the files of the
merge only, because some tools read the card of a model.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from mergegate.merge_core import CheckpointRef, Recipe, load_recipe, merge_weights, plan_merge, resolve_local
from mergegate.merge_core.adapters import CONFIG_FILE
from mergegate.merge_core.architecture.experts import match_experts
from mergegate.merge_core.checkpoint import read_gguf_header, read_header
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import open_buffered, read_plain
from mergegate.merge_core.recipe import parse_reference
from mergegate.tasks.base.stage import device_kind, separate_store, store, versions
from mergegate.tasks.merge import MergeSettings, combine_parents, numerics, prepare_recipe, with_new_routers
from mergegate.tasks.models.checkpoints import (
    Model,
    PinnedCheckpoint,
    ResolvedAdapter,
    ResolvedCheckpoint,
    adapted_digest,
    adapter_digest,
    checkpoint_digest,
    deciding_files,
    download_snapshots,
    pin_checkpoints,
)
from mergegate.tasks.models.checkpoints.hub import find_snapshot
from mergegate.tasks.quality.variants import Variant, VariantFormat
from mergegate.tasks.release.publish.content import DESCRIPTION_FILES, PROVENANCE, RECIPE, is_rebuilt
from mergegate.tasks.release.publish.releases.origin import MergeLink, find_merge
from mergegate.tasks.release.publish.releases.verify import VerifiedRelease
from mergegate.tasks.release.publish.targets import PublishedRelease

_CHUNK_BYTES = 1 << 20
_SHOWN = 5  # files that a message lists
_DECIDING_LIBRARIES = ("torch", "numba")  # their versions may change the last digit of a result
_SKIPPED_FOLDERS = frozenset({"node_modules", "site-packages", "__pycache__"})


def require_equal_files(
    release: PublishedRelease, listing: Mapping[str, tuple[int, str]], rebuilt: Mapping[str, Path], reason: str
) -> int:
    """Compare rebuilt files with a release that has the verified ``listing``, and return their size in bytes.

    ``rebuilt`` holds their paths by their names in the release. A file that ought to be rebuilt and was
    not counts as different.
    """
    hashes = store().hashes
    actual = {name: (path.stat().st_size, hashes.sha256(path, trust=False)) for name, path in rebuilt.items()}
    compared = set(rebuilt) | {name for name in listing if is_rebuilt(name)}
    if different := sorted(name for name in compared if actual.get(name) != listing.get(name)):
        details = []
        for name in different[:_SHOWN]:
            detail = "it was not rebuilt" if name not in rebuilt else "the release does not have it"
            if name in rebuilt and name in listing:
                detail = ""
                with suppress(MergegateError):  # the release cannot be downloaded
                    detail = first_difference(release.download() / name, rebuilt[name])
            details.append(f"{name} ({detail})" if detail else name)
        raise Refused(
            f"{release.reference}: {different[0]}",
            found=f"{len(different)} of {len(compared)} rebuilt files differ: {', '.join(details)}",
            expected="the same bytes",
            remedy=reason,
        )
    return sum(size for size, _ in actual.values())


def first_difference(original: Path, rebuilt: Path) -> str:
    """Return which part of a file of weights differs first, such as 'tensor blk.0.attn_q.weight'.

    The text is empty if the format is not known, or if a file is damaged.
    """
    try:
        tensors, others = _tensors(original), _tensors(rebuilt)
        for name in {**tensors, **others}:
            if name not in tensors or name not in others:
                return f"tensor {name}, which only the {'release' if name in tensors else 'rebuilt file'} has"
            (kind, offset, nbytes), (other_kind, other_offset, _) = tensors[name], others[name]
            if kind != other_kind:
                return f"tensor {name}: {kind}, rebuilt {other_kind}"
            if _differ((original, offset), (rebuilt, other_offset), nbytes):
                return f"tensor {name}"
        if original.suffix == ".gguf":
            values, rebuilt_values = (read_gguf_header(path).metadata for path in (original, rebuilt))
            for key in {**values, **rebuilt_values}:
                if values.get(key) != rebuilt_values.get(key):
                    return f"metadata {key}"
    except (MergegateError, OSError):
        pass  # The hashes have shown that the files differ.
    return ""


def _tensors(path: Path) -> dict[str, tuple[str, int, int]]:
    """Return type and shape, position and number of bytes of each tensor in a file, by name."""
    if path.suffix == ".gguf":
        header = read_gguf_header(path)
        return {each.name: (f"{each.type} {list(each.shape)}", each.offset, each.nbytes) for each in header.tensors}
    if path.suffix == ".safetensors":
        stored = read_header(path)
        return {each.name: (f"{each.dtype.code} {list(each.shape)}", each.offset, each.nbytes) for each in stored}
    return {}


def _differ(first: tuple[Path, int], second: tuple[Path, int], nbytes: int) -> bool:
    """Return whether ``nbytes`` bytes differ, from a position in one file and from a position in another."""
    with open_buffered(first[0]) as one, open_buffered(second[0]) as other:
        one.seek(first[1])
        other.seek(second[1])
        for start in range(0, nbytes, _CHUNK_BYTES):
            count = min(_CHUNK_BYTES, nbytes - start)
            if one.read(count) != other.read(count):
                return True
    return False


@dataclass(frozen=True)
class ReproducedRelease:
    """A release that was rebuilt byte for byte."""

    reference: str  # directory or URL of the release
    files: tuple[str, ...]  # names of the rebuilt files, all identical
    bytes: int  # size of these files in bytes
    seconds: float  # duration of the merge
    device: str  # device of the merge

    def __str__(self) -> str:
        head = f"rebuilt in {self.seconds:.1f} s on {self.device}; {len(self.files)} files, all identical"
        return "\n".join((f"{self.reference}: {head}", *(f"  = {name}" for name in self.files)))


def rebuild_release(
    release: PublishedRelease,
    verified_release: VerifiedRelease,
    out: Path,
    *,
    directory: Path | None = None,
    device: str = "auto",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReproducedRelease:
    """Merge again into the empty directory ``out``, and compare every file with the release.

    ``verified_release`` is the result of verifying ``release``. Relative paths in the recipe start at ``directory``.
    None: mergegate searches for it. ``device`` is auto, cpu, cuda or cuda:N. auto is the kind of device in the
    provenance if this machine has one, or else cpu.

    Raises:
        InvalidInput: A parent is missing or differs from the one in the provenance.
        Refused: The Hub cannot deliver a parent, or the rebuilt files differ from the release.
    """
    try:
        build = _Build.model_validate(verified_release.statement["predicate"]["buildDefinition"])
    except (ValidationError, KeyError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (error.args[0],), "msg": "missing"}
        location = f"{release.reference}: {PROVENANCE}: {'.'.join(map(str, first['loc']))}"
        raise _unreadable(location, str(first["msg"])) from None
    hashes, text = store().hashes, release.read(RECIPE)
    recipe = load_recipe(text.decode(), location=f"{release.reference}: {RECIPE}")
    directories = [directory] if directory else []
    if not directory:  # directories below the working directory with a recipe of the same content, except releases
        for top, folders, names in os.walk(Path.cwd()):
            folders[:] = sorted(name for name in folders if name[0] != "." and name not in _SKIPPED_FOLDERS)
            for name in sorted(name for name in names if name != RECIPE and name.endswith((".yaml", ".yml"))):
                with suppress(InvalidInput, OSError):  # skip files that cannot be read or are larger
                    if read_plain(Path(top) / name, len(text)) == text:
                        directories.append(Path(top))
        directories.append(Path.cwd())
    inputs = _Inputs({item.name: item for item in build.resolved_dependencies}, directories, hashes)
    parents = {str(reference): inputs.find_parent(reference) for reference in recipe.references()}

    def pin(ref: str) -> PinnedCheckpoint:
        model, adapter = parents[ref]
        applied = ResolvedAdapter(ref=ref, directory=adapter) if adapter else None
        return pin_checkpoints([ResolvedCheckpoint(name=ref, ref=ref, directory=model, adapter=applied)], hashes)[0]

    recipe = prepare_recipe(replace(recipe, directory=inputs.find_text_directory(recipe)), pin)
    kind, seed = build.internal_parameters.device, build.internal_parameters.seeds.merge
    if device == "auto":
        device = kind if device_kind() == kind else "cpu"
    recipe = with_new_routers(recipe, pin, numerics(MergeSettings(seed=seed, device=device)))
    started = time.monotonic()
    if recipe.output:
        adapters = [(ref, model, adapter) for ref, (model, adapter) in parents.items() if adapter]
        combine_parents(recipe, adapters, out, seed=seed, on_progress=on_progress)
    else:
        matched = match_experts(recipe, {ref: pin(ref).open() for ref in parents})
        plan = plan_merge(matched.recipe, matched.checkpoints)
        merge_weights(plan, out, seed=seed, device=device, on_progress=on_progress)
    seconds = time.monotonic() - started
    reason = explain_difference(build.internal_parameters.versions, versions(*_DECIDING_LIBRARIES), "recipe")
    if kind != device.partition(":")[0]:
        built = f"the release was built on {kind} and rebuilt on {device}"
        reason = f"{built}; use --device {kind} on a machine that has one"
    rebuilt = {path.relative_to(out).as_posix(): path for path in sorted(out.rglob("*")) if path.is_file()}
    total = require_equal_files(release, verified_release.listing, rebuilt, reason)
    return ReproducedRelease(release.reference, tuple(rebuilt), total, seconds, device)


def explain_difference(original_versions: Mapping[str, str], current_versions: Mapping[str, str], source: str) -> str:
    """Return why rebuilt files can differ, as a remedy: ``current_versions`` that are not the ``original_versions``.

    ``source`` names the origin of the files, such as 'recipe'.
    """
    changes = [
        f"{name} {original_versions[name]} (here {version or 'missing'})"
        for name, version in current_versions.items()
        if original_versions.get(name, version) != version
    ]
    if changes:
        return f"the release was built with {', '.join(changes)}; use those versions"
    return f"device and tools are the same; do not use the release, because its {source} does not give its weights"


class _ProvenancePart(BaseModel):
    """Part of the provenance, with the fields that a rebuild needs."""

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


@dataclass(frozen=True)
class _Inputs:
    """Inputs of the original merge, found on this machine or on the Hub and verified by their digests."""

    dependencies: Mapping[str, _Dependency]
    directories: Sequence[Path]  # base directories to search, the most likely first
    hashes: HashMemo

    def find_parent(self, reference: CheckpointRef) -> tuple[Path, Path | None]:
        """Return the verified directories of a parent and of its adapter."""
        name = str(reference)
        dependency = self.dependencies.get(name)
        if dependency is None:
            raise InvalidInput(
                name, found="a parent that the provenance does not name", expected="every parent of the recipe"
            )
        digest, actual = dependency.digest, None
        adapters: list[Path | None] = [None]
        if reference.adapter:
            adapter_reference = parse_reference(reference.adapter, name)
            commit = dependency.annotations.adapter.git_commit
            adapters = [*self._candidates(adapter_reference, commit, is_adapter=True)]
        for model in self._candidates(reference, digest.git_commit, is_adapter=False):
            for adapter in adapters:
                actual = checkpoint_digest(model, self.hashes)
                if adapter is not None:
                    actual = adapted_digest(actual, adapter_digest(adapter, self.hashes))
                if actual == digest.sha256:
                    return model, adapter
        raise InvalidInput(
            name,
            found=f"a checkpoint with the digest {actual[:16]}" if actual else "no such directory",
            expected=f"the checkpoint {digest.sha256[:16]} that was merged",
            remedy=f"pass --parents DIR with the merged checkpoint at DIR/{name.lstrip('/')}; "
            "a release names local models relative to DIR",
        )

    def _candidates(self, reference: CheckpointRef, commit: str | None, *, is_adapter: bool) -> Iterator[Path]:
        """Yield the directories that may contain a model or an adapter. Download one from the Hub at its ``commit``."""
        if commit:
            snapshot = find_snapshot(reference.path, commit, adapter=is_adapter)
            download_snapshots([snapshot], self.hashes)
            yield snapshot.directory
            return
        for base in self.directories:
            with suppress(InvalidInput):
                if (directory := resolve_local(reference, base)) is not None:
                    yield directory

    def find_text_directory(self, recipe: Recipe) -> Path | None:
        """Return the directory of the texts in the recipe, verified by hash, or None if the recipe has no texts."""
        texts = sorted({text for document in (*recipe.steps, recipe) for text in document.texts.values()})
        if not texts:
            return None
        for directory in self.directories:
            if not all((directory / text).is_file() for text in texts):
                continue
            for text in texts:
                expected = self.dependencies[text].digest.sha256 if text in self.dependencies else None
                if self.hashes.sha256(directory / text) != expected:
                    raise InvalidInput(
                        str(directory / text),
                        found="a text that differs from the one in the provenance",
                        expected="the text that the models read when the release was built",
                        remedy="restore the text, or pass its directory with --parents",
                    )
            return directory
        raise InvalidInput(
            texts[0],
            found="the file is missing",
            expected="the text that a model read for this merge, at the path in the recipe",
            remedy="pass the directory that the recipe's paths are relative to with --parents",
        )


def rebuild_variants(
    release: PublishedRelease,
    verified_release: VerifiedRelease,
    scratch: Path,
    *,
    merge: str | None = None,
    directory: Path | None = None,
) -> ReproducedRelease:
    """Quantize again in the empty directory ``scratch``, and compare every file with the release.

    ``scratch`` needs space for the merge, its unquantized form and the variants. ``merge`` refers to the release
    of the merge. None: the one next to ``release``. Relative paths of tools and texts start at ``directory``. None: the
    working directory.

    Raises:
        InvalidInput: The merge's release, a tool or a calibration text is missing.
        Refused: The merge cannot be quantized, or the rebuilt files differ from the release.
    """
    link = verified_release.merge
    found = find_merge(release, link, merge) if link else None
    if link is None or found is None or isinstance(found, MergeLink):
        raise InvalidInput(
            release.reference,
            found=str(link or "a release without a merge"),
            expected="the release of the merge, from which the variants are quantized again",
            remedy="pass its directory or address with --merge",
        )
    settings, published = _read_build(release, verified_release.statement)
    root = directory or Path.cwd()
    settings.check(root)
    with separate_store(scratch / "home"):
        model = _merge_model(found, scratch / "merge")
        started = time.monotonic()
        rebuilt: dict[str, Path] = {}
        original: dict[str, str] = {}
        installed: dict[str, str] = {}
        for variant_type, facts in published.items():
            artifact = settings.build(model, variant_type, root)
            rebuilt |= settings.release_files(link.name, artifact)
            original |= facts["versions"]
            installed |= dict.fromkeys(facts["versions"], "") | artifact.value.versions
            calibration = facts.get("calibration", "")
            if artifact.value.calibration != calibration:
                raise InvalidInput(
                    f"{release.reference}: calibration text",
                    found=f"a text with the sha256 {artifact.value.calibration[:12] or 'of none'}",
                    expected=f"the text with the sha256 {calibration[:12]} that the release was calibrated with",
                    remedy="pass the directory of that text with --parents",
                )
        seconds = time.monotonic() - started
        reason = explain_difference(original, installed, "merge")
        total = require_equal_files(release, verified_release.listing, rebuilt, reason)
    return ReproducedRelease(release.reference, tuple(sorted(rebuilt)), total, seconds, "cpu")


def _read_build(
    release: PublishedRelease, statement: Mapping[str, Any]
) -> tuple[VariantFormat, Mapping[str, Mapping[str, Any]]]:
    """Return the settings of the variants, and the facts about each published variant by its type."""
    try:
        definition = statement["predicate"]["buildDefinition"]
        entry, published = definition["externalParameters"]["variant"], definition["internalParameters"]["variants"]
        settings: VariantFormat = TypeAdapter(Variant).validate_python(entry)
        if unknown := set(published) - set(settings.variant_types):
            raise ValueError(f"{min(unknown)} is not a variant of its settings")
        TypeAdapter(dict[str, dict[str, Any]]).validate_python(published)
        for facts in published.values():
            TypeAdapter(dict[str, str]).validate_python(facts["versions"])
        return settings, published
    except (LookupError, TypeError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        found = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else f"no valid {error}"
        raise _unreadable(f"{release.reference}: {PROVENANCE}", found) from None


def _unreadable(location: str, found: str) -> Refused:
    return Refused(
        location,
        found=found,
        expected="provenance that this version of mergegate can read",
        remedy="reproduce the release with the version of mergegate that built it",
    )


def _merge_model(merge: PublishedRelease, directory: Path) -> Model:
    """Return the merge in a new ``directory`` with the files of the checkpoint only, which have the listed sha256."""
    source, listing, hashes = merge.download(), merge.files(), store().hashes
    names = [name for name in deciding_files(source) if name not in DESCRIPTION_FILES]
    if CONFIG_FILE in names:
        raise InvalidInput(
            merge.reference,
            found="an adapter, which the release does not contain a base model for",
            expected="a complete model",
            remedy="reproduce the release of the merge instead",
        )
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link((source / name).resolve(), path)
        except OSError:  # another disk
            shutil.copyfile(source / name, path)
        if (actual := hashes.sha256(path, trust=False)) != listing.get(name, (0, ""))[1]:
            raise Refused(
                f"{merge.reference}: {name}",
                found=f"sha256 {actual[:12]}…",
                expected="the file that was verified",
                remedy="run again; the file changed, or its download is damaged",
            )
    files = tuple((name, listing[name][1]) for name in sorted(names))
    return Model(name="merge", digest=checkpoint_digest(directory, hashes), directory=directory, files=files)

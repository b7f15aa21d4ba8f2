"""Rebuild the weights of a release from its recipe and its parents, and compare them byte by byte.

A release does not contain local paths. A parent on the Hub is downloaded at the commit in the provenance. For a local
parent, mergegate searches the working directory for copies of the recipe, and tries the path in the recipe relative to
each of them. It uses the parent only if its digest is the one in the provenance.
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
from mergegate.tasks.merge import MergeSettings, combine_parents, numerics, prepare_recipe, with_new_routers
from mergegate.tasks.publish import PROVENANCE, RECIPE
from mergegate.tasks.publish.releases.verify import VerifiedRelease
from mergegate.tasks.publish.releases.weights import require_equal_files
from mergegate.tasks.publish.targets import PublishedRelease
from mergegate.tasks.stage import device_kind, store, versions

_DECIDING_LIBRARIES = ("torch", "numba")  # their versions may change the last digit of a result
_SKIPPED_FOLDERS = frozenset({"node_modules", "site-packages", "__pycache__"})


@dataclass(frozen=True)
class ReproducedRelease:
    """A release that was rebuilt byte for byte.

    Attributes:
        reference: Directory or URL of the release.
        files: Names of the rebuilt files, all identical.
        bytes: Size of these files in bytes.
        seconds: Duration of the merge.
        device: Device of the merge.
    """

    reference: str
    files: tuple[str, ...]
    bytes: int
    seconds: float
    device: str

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
        raise Refused(
            f"{release.reference}: {PROVENANCE}: {'.'.join(map(str, first['loc']))}",
            found=str(first["msg"]),
            expected="provenance that this version of mergegate can read",
            remedy="reproduce the release with the version of mergegate that built it",
        ) from None
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
        checkpoints = {ref: open_checkpoint(model) for ref, (model, _) in parents.items()}
        for ref, (_, adapter) in parents.items():
            if adapter is not None:
                checkpoints[ref] = apply_adapter(checkpoints[ref], open_adapter(adapter))
        matched = match_experts(recipe, checkpoints)
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
        """Return the directory of the texts in the recipe, verified by hash, or None if the recipe has no texts.

        Raise InvalidInput if a text is missing or has changed.
        """
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

"""Run the publish stage: bring checkpoint, card, provenance and report to the target, all or nothing.

A request for approval names the release by the digest of all its files. The answer is valid for that digest only, and
``publish`` compares it with the release again. The digest does not cover a keyless signature, which ``publish`` creates
after the approval (see :func:`_add_keyless`).

The quantized variants of one place have a release of their own::

    demo-Q8_0.gguf, …                        weights and companions of every variant that passed
    evidence/Q8_0/gate.json, …               evidence of its verdict, as in the release of a merge
    LICENSE, licenses/…, NOTICE, …           the license files of the merge
    report.html, README.md, bom.json         about all variants of this place, including failed ones
    provenance.json, SHA256SUMS, model.sig   with the release of the merge as the only dependency

The release of the merge says nothing about its variants. So a profile can gain a variant, and a variant can fail,
without a new release of the merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import read_state, state_directory, write_state
from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.checkpoints import PinnedCheckpoint, PinnedRecipe
from mergegate.tasks.gate import GateVerdict, RecordedEvidence
from mergegate.tasks.merge import MergeSummary, Numerics, WeightComparison
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.publish.content import (
    BOM,
    CARD,
    COMPLIANCE,
    FACTS,
    KEYLESS_SIGNATURE,
    MAX_METADATA_BYTES,
    PROVENANCE,
    REPORT,
    SIGNATURE,
    SUMS,
    ReleaseFile,
    checksums_text,
    content_version,
    file_identities,
    parse_checksums,
    sha256_of,
    stored_files,
    variant_evidence,
    written_file,
)
from mergegate.tasks.publish.documents.card_metadata import card_metadata, contributing_references, variant_metadata
from mergegate.tasks.publish.documents.facts import DatasetFacts, ReleaseFacts, release_facts, variant_facts
from mergegate.tasks.publish.documents.license_files import license_files, open_obligations
from mergegate.tasks.publish.documents.provenance import MergeOrigin, MergeRelease, VariantOrigin
from mergegate.tasks.publish.documents.release_documents import with_documents
from mergegate.tasks.publish.public_names import PublicNames, require_no_private_paths
from mergegate.tasks.publish.signing import read_keyless, sign, sign_keyless
from mergegate.tasks.publish.targets.contract import PublishRequest, PublishTarget, Release
from mergegate.tasks.report import ReportContent
from mergegate.tasks.stage import advance, home, step, store
from mergegate.tasks.store import Artifact, NotInKey, StoredValue, digest, merkle
from mergegate.tasks.variants import VariantFormat, VariantRecord, VariantVerdict


class ReleaseParts(NamedTuple):
    """Inputs of a release, independent of its target.

    ``evidence`` holds the files from which anyone can recompute the verdict. ``names`` are the public names of local
    models and texts, as used in ``content``. ``held_out`` identifies the held-out text, if there is one.
    ``weights`` compares the merge with its parents. None: it was not compared, and the release claims nothing about it.
    """

    content: ReportContent
    pinned: PinnedRecipe
    numerics: Numerics
    license: StoredValue[LicenseVerdict]
    merge: Artifact[MergeSummary]
    evidence: Artifact[RecordedEvidence]
    names: PublicNames = PublicNames({})
    held_out: DatasetFacts | None = None
    weights: WeightComparison | None = None

    @property
    def name(self) -> str:
        """Name of the release: that of the profile."""
        return self.content.name

    @property
    def directories(self) -> tuple[Path, ...]:
        """Local directories. Their paths must not be published."""
        recipe = self.pinned.recipe.directory
        parents = (path for parent in self.pinned.parents for path in parent.directories)
        return (*parents, *([recipe] if recipe else []))

    def facts(self, target: PublishTarget) -> ReleaseFacts:
        """Return the facts that the documents of the release state."""
        license = self.names.apply(self.license.value)
        inputs = (self.content, self.pinned, license, self.merge)
        return release_facts(*inputs, target, self.names, self.held_out)

    def files(self, target: PublishTarget) -> list[ReleaseFile]:
        """Return all files before SHA256SUMS."""
        content, pinned, names = self.content, self.pinned, self.names
        license = names.apply(self.license.value)
        parents = tuple(parent.rename(names.rename_text) for parent in pinned.parents)
        files = [
            *stored_files(self.merge),
            *license_files(parents, license, weights=self.weights),
            *stored_files(self.evidence),
        ]
        merged = contributing_references(pinned.recipe)
        unused_refs = [parent.ref for parent, own in zip(parents, pinned.parents, strict=True) if own.ref not in merged]
        is_adapter = pinned.recipe.output is not None
        metadata = card_metadata(content, parents, license.combination, is_adapter=is_adapter, unused_refs=unused_refs)
        origin = MergeOrigin(
            self.numerics.model_copy(update={"where": ""}),
            [_without_directories(parent) for parent in parents],
            texts={names.rename_text(text): sha256 for text, sha256 in pinned.recipe.text_digests().items()},
            unused_refs=unused_refs,
            weights=self.weights,
        )
        missing = open_obligations(parents, license)
        return with_documents(files, content, license, missing, metadata, self.facts(target), origin, target)


def _without_directories(parent: PinnedCheckpoint) -> PinnedCheckpoint:
    adapter = parent.adapter and parent.adapter.model_copy(update={"directory": Path()})
    return parent.model_copy(update={"directory": Path(), "files": (), "adapter": adapter})


class Releasable(Protocol):
    """Inputs of a release, independent of its target: ``ReleaseParts`` or ``VariantParts``."""

    @property
    def name(self) -> str: ...  # of the release, for messages and in the signature
    @property
    def directories(self) -> Sequence[Path]: ...  # local directories; their paths must not be published
    def files(self, target: PublishTarget) -> list[ReleaseFile]: ...  # all files before SHA256SUMS


@dataclass(frozen=True)
class PendingRelease:
    """A release that is ready to be published.

    ``digest`` has 64 hex digits and covers name, size and sha256 of every file. ``is_current`` means that the target's
    current release has exactly these files, so that publishing changes nothing.
    """

    version: str
    digest: str
    is_current: bool

    def with_variants(self, variants: Sequence[PendingRelease]) -> PendingRelease:
        """Return this release together with those of its variants, which are approved or rejected as one."""
        releases = (self, *variants)
        joint = joint_digest([release.digest for release in releases])
        return PendingRelease(self.version, joint, all(release.is_current for release in releases))


def _is_published(
    target: PublishTarget,
    root: Path,
    parts: Releasable,
    expected_head: str | None = None,
    approved_digest: str | None = None,
) -> bool:
    if not target.current_is_local or (current := target.current_release(root)) is None:
        return False
    pending = pending_release(target, root, parts)
    return pending.is_current and pending.version == current.name


@step("publish", is_done=_is_published)
def publish(
    target: PublishTarget,
    root: Path,
    parts: Releasable,
    expected_head: str | None = None,
    approved_digest: str | None = None,
) -> Release:
    """Publish the release to ``target``. Idempotent. Relative paths start at ``root``.

    ``expected_head`` is ``CurrentRelease.head`` of the release that the merge was compared with. None: accept any head.
    ``approved_digest`` is the digest of the release that a reviewer approved. None: approval is not required.

    Raises:
        InvalidInput: The Hub token, the signing key, or the identity for a keyless signature is missing.
        Refused: The version exists with different content, a file differs from the one that passed the gate, the
            release is not the approved one, the Hub would misread the card, the target rejects the release, or its head
            is not ``expected_head``.
    """
    files = _release_files(target, root, parts)
    version = target.version or content_version(files)
    own_digest = merkle(file_identities(files))
    require_approved(parts.name, own_digest, approved_digest)
    pending = home() / "signatures" / f"{own_digest}.json"
    request = PublishRequest(
        files=_add_keyless(target, root, parts.name, version, files, pending),
        name=parts.name,
        version=version,
        root=root,
        hashes=store().hashes,
        expected_head=expected_head,
        on_progress=lambda sent, total: advance(sent, total, "B"),
    )
    try:
        release = target.publish(request)
    except Refused:
        # Another publisher may have published the same files in the meantime, with a signature of its own.
        signed = _add_keyless(target, root, parts.name, version, files, pending)
        if signed == request.files:
            raise
        release = target.publish(replace(request, files=signed))
    pending.unlink(missing_ok=True)
    return release


def pending_release(target: PublishTarget, root: Path, parts: Releasable) -> PendingRelease:
    """Return the release that :func:`publish` would publish, without publishing it.

    The errors are those of ``publish``, and Refused if the target is unavailable.
    """
    files = _release_files(target, root, parts)
    sums = next(file.read() for file in files if file.name == SUMS)
    is_current = False
    if (current := target.current_release(root)) is not None:
        path = current.directory / SUMS
        with suppress(OSError):
            is_current = path.stat().st_size == len(sums) and path.read_bytes() == sums
    return PendingRelease(target.version or content_version(files), merkle(file_identities(files)), is_current)


def release_digest(target: PublishTarget, root: Path, parts: Releasable) -> str:
    """Return the digest of the release that :func:`publish` would publish, as in ``PendingRelease``."""
    return merkle(file_identities(_release_files(target, root, parts)))


def joint_digest(digests: Sequence[str]) -> str:
    """Return the digest of a release and those of its variants, which are approved as one."""
    return digests[0] if len(digests) == 1 else digest(digests)


def require_approved(name: str, release_digest: str, approved_digest: str | None) -> None:
    """Raise Refused if a reviewer approved another release. None: approval is not required."""
    if approved_digest is not None and release_digest != approved_digest:
        raise Refused(
            name,
            found=f"a release with the digest {release_digest[:12]}…",
            expected=f"{approved_digest[:12]}…, the release that was approved",
            remedy="run again; mergegate then asks for approval of the new release",
        )


def describe_merge(target: PublishTarget, root: Path, parts: ReleaseParts) -> MergeRelease:
    """Return the release of a merge that :func:`publish` would publish, as the dependency of its variants."""
    files = _release_files(target, root, parts)
    sums = next(file.sha256 for file in files if file.name == SUMS)
    version = target.version or content_version(files)
    return MergeRelease(parts.name, version, sums, target.reference_to(version), target.hub_id)


def _add_keyless(
    target: PublishTarget, root: Path, name: str, version: str, files: tuple[ReleaseFile, ...], pending: Path
) -> tuple[ReleaseFile, ...]:
    """Return the files of a release with its keyless signature, if the profile sets one.

    Signing again gives other bytes, but a version never changes its content. So a signature of the same files is used
    again: that of the published version, or that of an interrupted publication, which is in the file ``pending``.
    """
    if target.sigstore is None:
        return files
    hashes = {file.name: file.sha256 for file in files}
    stored = read_state(pending, bytes)
    for bundle in (target.published_file(root, version, KEYLESS_SIGNATURE), stored):
        with suppress(ValueError):
            if isinstance(bundle, bytes) and read_keyless(bundle).files == hashes:
                return (*files, written_file(KEYLESS_SIGNATURE, bundle.decode()))
    signature = sign_keyless(name, hashes, target.sigstore, root)
    state_directory(pending.parent, private=True)
    write_state(pending, signature)
    return (*files, written_file(KEYLESS_SIGNATURE, signature.decode()))


def _release_files(target: PublishTarget, root: Path, parts: Releasable) -> tuple[ReleaseFile, ...]:
    """Return all files of a release except a keyless signature. The same inputs give the same bytes.

    SHA256SUMS covers all files of ``parts``, and the signature covers everything.
    """
    files = parts.files(target)
    files.append(written_file(SUMS, checksums_text({file.name: file.sha256 for file in files})))
    if target.sign_key is not None:
        signature = sign(parts.name, {file.name: file.sha256 for file in files}, root / target.sign_key)
        files.append(written_file(SIGNATURE, signature))
    require_no_private_paths(files, [root, home(), *parts.directories], parts.name)
    return tuple(files)


class PassedVariant(NamedTuple):
    """A variant that is published: its type, its weights, and the evidence of its verdict."""

    type: str
    weights: Artifact[VariantRecord]
    evidence: Artifact[RecordedEvidence]


class VariantParts(NamedTuple):
    """Inputs of a release of variants, independent of its target.

    ``content`` is that of the report on the variants of this place (see ``variant_content``). ``merge`` is the release
    that they were quantized from. ``names`` are the public names of local models and texts, and ``held_out`` identifies
    the held-out text, if there is one.
    """

    content: ReportContent
    settings: VariantFormat
    passed: tuple[PassedVariant, ...]
    merge: MergeRelease
    pinned: PinnedRecipe
    license: StoredValue[LicenseVerdict]
    names: PublicNames = PublicNames({})
    held_out: DatasetFacts | None = None

    @property
    def name(self) -> str:
        """Name of the release: that of the merge with the suffix of the place."""
        return self.content.name

    def files(self, target: PublishTarget) -> list[ReleaseFile]:
        """Return all files before SHA256SUMS, as ``ReleaseParts.files`` does."""
        content, names, settings = self.content, self.names, self.settings
        license = names.apply(self.license.value)
        parents = tuple(parent.rename(names.rename_text) for parent in self.pinned.parents)
        weights = {each.type: self._weights(each) for each in self.passed}
        files = [
            *(file for each in weights.values() for file in each),
            *license_files(parents, license, quantized_from=f"{self.merge.name} {self.merge.version}"),
            *(
                ReleaseFile(variant_evidence(file.name, each.type), file.size, file.sha256, file.source)
                for each in self.passed
                for file in stored_files(each.evidence)
            ),
        ]
        files = self._distinct(files)
        local = {name for name, field in type(settings).model_fields.items() if NotInKey in field.metadata}
        entry = names.apply(settings.model_dump(mode="json", exclude=local, exclude_defaults=True))
        origin = VariantOrigin(
            self.merge,
            entry,
            {variant_type: [file.name for file in each] for variant_type, each in weights.items()},
        )
        tags = (str(entry["format"]), *weights)
        metadata = variant_metadata(
            content.kind, parents, license.combination, self.merge.hub_id, settings.library_name, tags
        )
        inputs = (content, self.pinned, license, self.merge, weights)
        facts = variant_facts(*inputs, target, names, self.held_out, settings.calibration)
        missing = open_obligations(parents, license)
        return with_documents(files, content, license, missing, metadata, facts, origin, target)

    def _weights(self, variant: PassedVariant) -> tuple[ReleaseFile, ...]:
        """Return the files of a variant by their public names, with the hashes that the store recorded."""
        artifact, files = variant.weights, []
        for name, path in self.settings.release_files(self.merge.name, artifact).items():
            stored = path.relative_to(artifact.directory).as_posix() if path.is_relative_to(artifact.directory) else ""
            sha256 = artifact.files.get(stored) or store().hashes.sha256(path)
            files.append(ReleaseFile(name, path.stat().st_size, sha256, path))
        return tuple(files)

    def _distinct(self, files: Sequence[ReleaseFile]) -> list[ReleaseFile]:
        """Return each file once. Raise Refused if two different files have the same name."""
        by_name: dict[str, ReleaseFile] = {}
        for file in files:
            if by_name.setdefault(file.name, file).sha256 != file.sha256 or file.name in _RESERVED:
                raise Refused(
                    f"{self.name}: {file.name}",
                    found="a file of a variant has the name of another file of the release",
                    expected="a name of its own for each file",
                    remedy="list the variants as two entries of 'variants', each with a 'suffix' of its own",
                )
        return list(by_name.values())

    @property
    def directories(self) -> tuple[Path, ...]:
        """Local directories. Their paths must not be published."""
        recipe = self.pinned.recipe.directory
        own = (*(path for parent in self.pinned.parents for path in parent.directories), self.settings.python)
        return tuple(path for path in (*own, recipe) if path is not None)


_RESERVED = frozenset({CARD, COMPLIANCE, BOM, FACTS, PROVENANCE, REPORT, SUMS, SIGNATURE, KEYLESS_SIGNATURE})


def variant_content(
    content: ReportContent, name: str, merge: MergeRelease, verdicts: Sequence[VariantVerdict]
) -> ReportContent:
    """Return the content of the report on the variants of one place.

    ``content`` is that of the merge, and ``name`` that of the variants' release. The result has no judgment of the
    merge, which depends on the release that was current at the time. So the same variants of the same merge give the
    same report in every run. Observations that differ between machines, and the texts that a tokenizer splits
    differently, are removed.
    """
    published = []
    for verdict in verdicts:
        checks = tuple(check.model_copy(update={"seen": "", "where": ""}) for check in verdict.checks)
        update: dict[str, object] = {"checks": checks}
        if conversion := verdict.conversion:
            hidden = ("…",) * len(conversion.different_texts)
            update["conversion"] = conversion.model_copy(update={"different_texts": hidden})
        published.append(verdict.model_copy(update=update))
    passed = [verdict for verdict in published if verdict.publishable]
    inconclusive = [verdict for verdict in passed if verdict.outcome != "pass"]
    joint = GateVerdict(
        outcome=inconclusive[0].outcome if inconclusive else "pass",
        publishable=True,
        guards=(),
        drift=None,
        overall_drop=None,
        overall_low=None,
        overall_high=None,
        on_inconclusive=content.verdict.on_inconclusive,
        reasons=tuple(f"variant {verdict.type}: {reason}" for verdict in inconclusive for reason in verdict.reasons),
    )
    kept = ("kind", "licence", "obligations", "scoring", "asked", "windows", "files", "versions", "overrides")
    return ReportContent(
        name=name,
        method=f"quantized from {merge.name} {merge.version}",
        models=tuple(model.model_copy(update={"scores": None, "likelihoods": None}) for model in content.models),
        verdict=joint,
        reproduce=(
            "mergegate verify RELEASE --verdict    # decide again from the outcomes in evidence/, without a model",
            "mergegate reproduce RELEASE           # quantize again, and compare the weights byte by byte",
        ),
        variants=tuple(published),
        **{field: getattr(content, field) for field in kept},
    )


def published_merge(target: PublishTarget, name: str, directory: Path) -> MergeRelease:
    """Return the published release of a merge in ``directory`` as the dependency of its variants.

    ``target`` is that of the merge, and ``name`` the name of its release.

    Raises:
        Refused: The release has no SHA256SUMS.
    """
    try:
        sums = read_plain(directory / SUMS, MAX_METADATA_BYTES)
        listed = parse_checksums(sums.decode())
        hashes = {**listed, SUMS: sha256_of(sums)}
        if (directory / SIGNATURE).exists():
            hashes[SIGNATURE] = sha256_of(read_plain(directory / SIGNATURE, MAX_METADATA_BYTES))
        files = [ReleaseFile(each, (directory / each).stat().st_size, sha, b"") for each, sha in hashes.items()]
    except (OSError, ValueError, InvalidInput) as error:
        raise Refused(
            f"{directory}: {SUMS}",
            found=f"the published release cannot be read: {error}",
            expected="the release that the variants are quantized from",
            remedy="publish the merge again, then run again",
        ) from None
    version = target.version or content_version(files)
    return MergeRelease(name, version, sha256_of(sums), target.reference_to(version), target.hub_id)

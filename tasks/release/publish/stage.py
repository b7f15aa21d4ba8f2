"""Run the publish stage: bring checkpoint, card, provenance and report to the target, all or nothing.

A request for approval names the release by the digest of all its files. The answer is valid for that digest only, and
``publish`` compares it with the release again. The digest does not cover a keyless signature, which ``publish`` creates
after the approval (see :func:`_add_keyless`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import read_state, state_directory, write_state
from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.base.stage import advance, home, step, store
from mergegate.tasks.base.store import digest, merkle
from mergegate.tasks.release.publish.content import (
    KEYLESS_SIGNATURE,
    MAX_METADATA_BYTES,
    SIGNATURE,
    SUMS,
    ReleaseFile,
    checksums_text,
    content_version,
    file_identities,
    parse_checksums,
    sha256_of,
    written_file,
)
from mergegate.tasks.release.publish.documents.facts import MergeRelease
from mergegate.tasks.release.publish.documents.release_parts import Releasable, ReleaseParts
from mergegate.tasks.release.publish.public_names import require_no_private_paths
from mergegate.tasks.release.publish.signing import read_keyless, sign, sign_keyless
from mergegate.tasks.release.publish.targets.contract import PublishRequest, PublishTarget, Release


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


def published_merge(target: PublishTarget, name: str, directory: Path) -> MergeRelease:
    """Return the published release of a merge, called ``name``, in ``directory`` as the dependency of its variants."""
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

"""Run the publish stage: bring checkpoint, card, provenance and report to the target, all or nothing.

A request for approval names the release by the digest of all its files. The answer is valid for that digest only, and
``publish`` compares it with the release again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.errors import Refused
from mergegate.tasks.checkpoints import PinnedRecipe, checkpoint_digest
from mergegate.tasks.gate import RecordedEvidence
from mergegate.tasks.merge import MergeSummary, Numerics, OptimizerState, optimizer_state_paths
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.publish.bom import bill_of_materials
from mergegate.tasks.publish.card import Publication, model_card
from mergegate.tasks.publish.card_metadata import card_metadata, check_card
from mergegate.tasks.publish.content import (
    BOM,
    CARD,
    PROVENANCE,
    RECIPE,
    SIGNATURE,
    SUMS,
    ReleaseFile,
    checksums_text,
    content_version,
    file_identities,
    stored_files,
    written_file,
)
from mergegate.tasks.publish.eval_results import eval_results
from mergegate.tasks.publish.license_files import license_files, open_obligations
from mergegate.tasks.publish.provenance import MergeOrigin, provenance
from mergegate.tasks.publish.public_names import PublicNames, require_no_private_paths
from mergegate.tasks.publish.signature import sign
from mergegate.tasks.publish.targets.contract import PublishRequest, PublishTarget, Release
from mergegate.tasks.report import Report, ReportContent
from mergegate.tasks.stage import advance, home, step, store
from mergegate.tasks.store import Artifact, StoredValue, merkle


class ReleaseParts(NamedTuple):
    """Inputs of a release, independent of its target.

    ``evidence`` holds the files from which anyone can recompute the verdict. ``state`` is the optimizer state for the
    next merge, if there is any. The provenance names it, but it is not published. ``names`` are the public names of
    local models and texts, as used in ``content``.
    """

    content: ReportContent
    pinned: PinnedRecipe
    numerics: Numerics
    license: StoredValue[LicenseVerdict]
    merge: Artifact[MergeSummary]
    report: Artifact[Report]
    evidence: Artifact[RecordedEvidence]
    state: Artifact[OptimizerState] | None = None
    names: PublicNames = PublicNames({})


@dataclass(frozen=True)
class PendingRelease:
    """A release that is ready to be published.

    ``digest`` has 64 hex digits and covers name, size and sha256 of every file. ``is_current`` means that the target's
    current release has exactly these files, so that publishing changes nothing.
    """

    version: str
    digest: str
    is_current: bool


def _is_published(
    target: PublishTarget,
    root: Path,
    parts: ReleaseParts,
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
    parts: ReleaseParts,
    expected_head: str | None = None,
    approved_digest: str | None = None,
) -> Release:
    """Publish the release to ``target``. Idempotent. Relative paths start at ``root``.

    ``expected_head`` is ``CurrentRelease.head`` of the release that the merge was compared with. None: accept any head.
    ``approved_digest`` is the digest of the release that a reviewer approved. None: approval is not required.

    Raises:
        InvalidInput: The Hub token or the signing key is missing.
        Refused: The version exists with different content, a file differs from the one that passed the gate, the
            release is not the approved one, the Hub would misread the card, the target rejects the release, or its head
            is not ``expected_head``.
    """
    files = _release_files(target, root, parts)
    if approved_digest is not None and (digest := merkle(file_identities(files))) != approved_digest:
        raise Refused(
            parts.content.name,
            found=f"a release with the digest {digest[:12]}…",
            expected=f"{approved_digest[:12]}…, the release that was approved",
            remedy="run again; mergegate then asks for approval of the new release",
        )
    request = PublishRequest(
        files=files,
        name=parts.content.name,
        version=target.version or content_version(files),
        root=root,
        hashes=store().hashes,
        expected_head=expected_head,
        on_progress=lambda sent, total: advance(sent, total, "B"),
    )
    return target.publish(request)


def pending_release(target: PublishTarget, root: Path, parts: ReleaseParts) -> PendingRelease:
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


def _release_files(target: PublishTarget, root: Path, parts: ReleaseParts) -> tuple[ReleaseFile, ...]:
    """Return all files of a release. The same inputs give the same bytes.

    Each file describes the files before it: the card describes the checkpoint, the bill of materials lists the files,
    the provenance covers both, SHA256SUMS covers all of these, and the signature covers everything.
    """
    content, pinned, numerics, names = parts.content, parts.pinned, parts.numerics, parts.names
    license = names.apply(parts.license.value)
    parents = tuple(parent.rename(names.rename_text) for parent in pinned.parents)
    files = [
        *stored_files(parts.merge),
        *license_files(parents, license),
        *(file for file in stored_files(parts.report) if file.name == "report.html"),
        *stored_files(parts.evidence),
        *(written_file(name, text) for name, text in eval_results(content).items()),
        written_file(RECIPE, content.recipe),
    ]
    file_names = [file.name for file in files]
    metadata = card_metadata(content, parents, license.combination, is_adapter=pinned.recipe.output is not None)
    versions = {library.name: library.version for library in content.versions} | dict(numerics.versions)
    publication = Publication(target.address, target.sign_key is not None, numerics.device, versions)
    card = model_card(content, metadata, license, open_obligations(parents, license), file_names, publication)
    check_card(card, metadata, file_names)
    files.append(written_file(CARD, card))
    files.append(written_file(BOM, bill_of_materials(files, content, parents, license.combination.card)))
    texts = pinned.recipe.calibration_results()
    origin = MergeOrigin(
        numerics,
        parents,
        texts={names.rename_text(request.text): text.text for request, text in texts.items()},
        byproducts={
            name: (checkpoint_digest(directory, store().hashes), stored)
            for name, (stored, directory) in (optimizer_state_paths(parts.state) if parts.state else {}).items()
        },
    )
    files.append(written_file(PROVENANCE, provenance(files, content, origin, license, metadata)))
    files.append(written_file(SUMS, checksums_text({file.name: file.sha256 for file in files})))
    if target.sign_key is not None:
        signature = sign(content.name, {file.name: file.sha256 for file in files}, root / target.sign_key)
        files.append(written_file(SIGNATURE, signature))
    directories = [root, home(), *(path for parent in pinned.parents for path in parent.directories)]
    directories += [pinned.recipe.directory] if pinned.recipe.directory else []
    require_no_private_paths(files, directories, content.name)
    return tuple(files)

"""Run the publish stage: bring checkpoint, card, provenance and report to the target, all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.errors import Refused
from mergegate.merge_core.parsing import parse_yaml
from mergegate.tasks.checkpoints import PinnedRecipe, checkpoint_digest
from mergegate.tasks.merge import Merged, Numerics, OptimizerState, optimizer_state_paths
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.publish.approval import PendingRelease, is_published_in, release_digest
from mergegate.tasks.publish.bom import bill_of_materials
from mergegate.tasks.publish.card import Publication, model_card
from mergegate.tasks.publish.card_metadata import card_metadata, check_card
from mergegate.tasks.publish.checksums import checksums
from mergegate.tasks.publish.content import (
    BOM,
    CARD,
    PROVENANCE,
    RECIPE,
    SIGNATURE,
    SUMS,
    ReleaseFile,
    content_version,
    stored_files,
    written_file,
)
from mergegate.tasks.publish.eval_results import eval_results
from mergegate.tasks.publish.license_files import license_files, open_obligations
from mergegate.tasks.publish.provenance import provenance
from mergegate.tasks.publish.public_names import PublicNames, require_no_private_paths
from mergegate.tasks.publish.signature import sign
from mergegate.tasks.publish.targets.contract import PublishTarget, Release
from mergegate.tasks.report import Report, ReportContent
from mergegate.tasks.stage import advance, home, step, store
from mergegate.tasks.store import Artifact, StoredValue

_UNCHANGED = PublicNames({})


class ReleaseParts(NamedTuple):
    """The inputs of a release, independent of its target: evidence, merge, and license verdict."""

    content: ReportContent
    pinned: PinnedRecipe
    numerics: Numerics
    license: StoredValue[LicenseVerdict]
    merged: Artifact[Merged]
    report: Artifact[Report]
    state: Artifact[OptimizerState] | None = None  # optimizer state for the next merge, if the optimizer has any
    names: PublicNames = _UNCHANGED  # public names used in ``content``


def _is_published(
    target: PublishTarget,
    root: Path,
    parts: ReleaseParts,
    expected_head: str | None = None,
    approved: str | None = None,
) -> bool:
    if not target.shows_itself or (current := target.current(root)) is None:
        return False
    pending = pending_release(target, root, parts)
    return pending.is_current and pending.version == current.name


@step("publish", is_done=_is_published)
def publish(
    target: PublishTarget,
    root: Path,
    parts: ReleaseParts,
    expected_head: str | None = None,
    approved: str | None = None,
) -> Release:
    """Publish to ``target``. Relative paths start at ``root``. Idempotent.

    Args:
        expected_head: ``CurrentRelease.head`` of the release that the merge was compared with. If the target's head has
            changed, the release is refused. None: any head is accepted.
        approved: Digest of the release that a reviewer approved. None: approval is not required.

    Raises:
        InvalidInput: The Hub token or the signing key is missing.
        Refused: The version exists with different content, the merge differs from the gated or approved one, the card
            does not read as intended, the target rejects the release, or its head is not ``expected_head``.
    """
    files = _files_for(target, root, parts)
    if approved is not None and (digest := release_digest(files)) != approved:
        raise Refused(
            parts.content.name,
            found=f"a release of the digest {digest[:12]}…",
            expected=f"{approved[:12]}…, which was approved",
            remedy="run again: somebody is asked about what it is now",
        )

    def report_bytes(sent: int, total: int) -> None:
        advance(sent, total, "B")

    return target.publish(
        files,
        parts.content.name,
        target.version or content_version(files),
        root,
        expected_head=expected_head,
        hashes=store().hashes,
        on_progress=report_bytes,
    )


def pending_release(
    target: PublishTarget,
    root: Path,
    parts: ReleaseParts,
) -> PendingRelease:
    """Return the release that :func:`publish` would publish, and whether it is published already. Changes nothing.

    Raises:
        InvalidInput: As ``publish``.
        Refused: As ``publish``, or the target is unavailable.
    """
    files = _files_for(target, root, parts)
    current = target.current(root)
    return PendingRelease(
        target.version or content_version(files),
        release_digest(files),
        current is not None and is_published_in(current.directory, files),
    )


def _files_for(target: PublishTarget, root: Path, parts: ReleaseParts) -> tuple[ReleaseFile, ...]:
    key = root / target.sign_key if target.sign_key else None
    content, pinned, numerics, license, merged, report, state, names = parts
    files = release_files(content, pinned, numerics, license.value, merged, report, target.address, key, state, names)
    directories = [root, home(), *(path for parent in pinned.parents for path in parent.directories)]
    directories += [pinned.recipe.directory] if pinned.recipe.directory else []
    require_no_private_paths(files, directories, content.name)
    return files


def release_files(
    content: ReportContent,
    pinned: PinnedRecipe,
    numerics: Numerics,
    license: LicenseVerdict,
    merged: Artifact[Merged],
    report: Artifact[Report],
    address: str,
    key: Path | None = None,
    state: Artifact[OptimizerState] | None = None,
    names: PublicNames = _UNCHANGED,
) -> tuple[ReleaseFile, ...]:
    """Return all files of a release. The result is deterministic.

    Each layer describes the layers before it: the card describes the checkpoint, the bill of materials lists the files,
    the provenance covers both, SHA256SUMS covers all of these, and the signature (with the private key in ``key``)
    covers everything.

    Args:
        address: Reference to pass to mergegate: a repository, or '.' in the release's directory.
        state: Optimizer state for the next merge. It is not published, but the provenance names it.
        names: Public names of local models and texts, as used in ``content``.

    Raises:
        InvalidInput: ``key`` is not a private key.
        Refused: The Hub's library reads the card differently than intended.
    """
    license = names.apply(license)
    parents = tuple(parent.renamed(names.text) for parent in pinned.parents)
    files = [
        *stored_files(merged),
        *license_files(parents, license),
        *(file for file in stored_files(report) if file.name == "report.html"),
        *(written_file(name, text) for name, text in eval_results(content).items()),
        written_file(RECIPE, content.recipe),
    ]
    file_names = [file.name for file in files]
    versions = {library.name: library.version for library in content.versions}
    metadata = card_metadata(content, parents, license.combination, is_adapter=pinned.recipe.output is not None)
    publication = Publication(address, key is not None, numerics.device, {**versions, **numerics.versions})
    missing = open_obligations(parents, license)
    card = model_card(content, metadata, license, missing, file_names, publication)
    check_card(card, metadata, file_names)
    files.append(written_file(CARD, card))
    files.append(written_file(BOM, bill_of_materials(files, content, parents, license.combination.card)))
    origin = provenance(
        files,
        recipe=parse_yaml(content.recipe, "recipe"),
        profile=content.name,
        overrides=content.overrides,
        numerics=numerics,
        evaluation_seed=content.scoring.seed if content.scoring else None,
        parents=parents,
        texts={names.text(request.text): text.text for request, text in pinned.recipe.calibration_results().items()},
        versions=versions,
        verdict=content.verdict,
        license=license,
        card=metadata,
        byproducts={
            name: (checkpoint_digest(directory, store().hashes), stored)
            for name, (stored, directory) in (optimizer_state_paths(state) if state else {}).items()
        },
    )
    files.append(written_file(PROVENANCE, origin))
    files.append(written_file(SUMS, checksums(files)))
    if key is not None:
        signature = sign(content.name, {file.name: file.sha256 for file in files}, key)
        files.append(written_file(SIGNATURE, signature))
    return tuple(files)

"""The publish step: checkpoint, card, provenance and report, together at the target or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.errors import Refused
from mergegate.merge_core.parsing import parse_yaml
from mergegate.tasks.checkpoints import PinnedRecipe, checkpoint_digest
from mergegate.tasks.merge import Merged, Numerics, OptimizerState, optimizer_state_paths
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.publish.approval import PendingRelease, release_digest, stands_in
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
    """What a release is made of, wherever it goes: the evidence, the merge, and what may be done with it."""

    content: ReportContent
    pinned: PinnedRecipe
    numerics: Numerics
    license: StoredValue[LicenseVerdict]
    merged: Artifact[Merged]
    report: Artifact[Report]
    state: Artifact[OptimizerState] | None = None  # of a merge whose optimizer keeps something for the next one
    names: PublicNames = _UNCHANGED  # with which the content was written


def _stands(
    target: PublishTarget,
    root: Path,
    parts: ReleaseParts,
    expected_head: str | None = None,
    approved: str | None = None,
) -> bool:
    if not target.shows_itself or (current := target.current(root)) is None:
        return False
    pending = pending_release(target, root, parts)
    return pending.stands and pending.version == current.name


@step("publish", is_done=_stands)
def publish(
    target: PublishTarget,
    root: Path,
    parts: ReleaseParts,
    expected_head: str | None = None,
    approved: str | None = None,
) -> Release:
    """Publish to ``target``; relative paths relative to ``root``. Idempotent.

    Args:
        expected_head: Of the release that the merge was compared with (``CurrentRelease.head``): when the target has
            another now, nothing is published. None: whatever is there.
        approved: Digest of the release that a person said yes to; None: nobody had to.

    Raises:
        InvalidInput: when there is no token for the Hub, or no key to sign with.
        Refused: when the version exists with other content, the merge is not what was gated or approved any more, the
            card does not say to others what it is meant to, or the target says no or has another head than
            ``expected_head``.
    """
    files = _files_for(target, root, parts)
    if approved is not None and (digest := release_digest(files)) != approved:
        raise Refused(
            parts.content.name,
            found=f"a release of the digest {digest[:12]}…",
            expected=f"{approved[:12]}…, which was approved",
            remedy="run again: somebody is asked about what it is now",
        )

    def report_bytes(done: int, total: int) -> None:
        advance(done, total, "B")

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
    """What :func:`publish` would publish of the same arguments, and whether that is there already. Changes nothing.

    Raises:
        InvalidInput: as ``publish``.
        Refused: as ``publish``, or when the target cannot tell what is released there.
    """
    files = _files_for(target, root, parts)
    current = target.current(root)
    return PendingRelease(
        target.version or content_version(files),
        release_digest(files),
        current is not None and stands_in(current.directory, files),
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
    place: str,
    key: Path | None = None,
    state: Artifact[OptimizerState] | None = None,
    names: PublicNames = _UNCHANGED,
) -> tuple[ReleaseFile, ...]:
    """Everything that a release consists of; the same inputs give the same bytes.

    Each layer speaks of those before it: the card of what is there, the bill of materials of the files, the provenance
    of both, SHA256SUMS of all, and the signature (with the private key in ``key``) of all of that.

    Args:
        place: What to name to mergegate where it will stand: a repository, or '.' in its directory.
        state: What stays behind for the next merge: the provenance names it.
        names: Names of local models and texts, as in ``content``.

    Raises:
        InvalidInput: when ``key`` is no key.
        Refused: when the Hub's library would read something else out of the card.
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
    made_with = Publication(place, key is not None, numerics.device, {**versions, **numerics.versions})
    missing = open_obligations(parents, license)
    card = model_card(content, metadata, license, missing, file_names, made_with)
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
        texts={names.text(asked.text): one.text for asked, one in pinned.recipe.calibration_results().items()},
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

"""The publish step: checkpoint, card, provenance and report, together at the target or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from merge_core.store import Artifact
from tasks.hub.access import hub_access
from tasks.licenses.check import LicenseVerdict
from tasks.merge import Merged
from tasks.pin import Parent, PinnedRecipe
from tasks.publish.bom import bill_of_materials
from tasks.publish.card import model_card
from tasks.publish.content import (
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
from tasks.publish.directory import publish_directory
from tasks.publish.hub import publish_hub
from tasks.publish.provenance import provenance
from tasks.publish.settings import HubTarget, Target
from tasks.publish.signature import sign
from tasks.publish.sums import sums
from tasks.report import Report, ReportContent
from tasks.stage import step, store


@dataclass(frozen=True)
class Release:
    """A release where it stands. ``new`` is false when it stood there already and nothing was touched."""

    name: str
    version: str
    location: Path | str  # a directory, or the address of a page
    place: str  # the same, short: what a person calls the target
    new: bool

    def summary(self) -> str:
        return f"{self.version} at {self.place}" if self.new else f"{self.version} is released already"


@step("publish")
def publish(
    target: Target,
    root: Path,
    content: ReportContent,
    pinned: PinnedRecipe,
    seed: int,
    licence: Artifact[LicenseVerdict],
    merged: Artifact[Merged],
    report: Artifact[Report],
    base: str | None = None,
) -> Release:
    """Publish to ``target``; relative paths relative to ``root``. Idempotent.

    Args:
        base: On the Hub, the commit of ``main`` that the merge was held against: when it has moved since, nothing is
            published. None: whatever is there.

    Raises:
        InvalidInput: when there is no token for the Hub, or no key to sign with.
        Refused: when the version exists with other content, the merge is not what was gated any more, or the Hub says
            no or has another ``main`` than ``base``.
    """
    key = root / target.sign_key if target.sign_key else None
    files = release_files(content, pinned, seed, licence.value, merged, report, key)
    version = target.version or content_version(files)
    if isinstance(target, HubTarget):
        access = hub_access(target.token_block, writing=True)
        there = publish_hub(
            files,
            target.repo,
            version,
            access,
            store().hashes,
            visibility=target.visibility,
            gated=target.gated or False,
            base=base,
        )
        return Release(content.name, version, access.url(target.repo, version), target.repo, there.new)
    place = publish_directory(files, (root / target.path).resolve(), version, store().hashes)
    return Release(content.name, version, place.location, f"{place.location.parent.name}/", place.new)


def release_files(
    content: ReportContent,
    pinned: PinnedRecipe,
    seed: int,
    licence: LicenseVerdict,
    merged: Artifact[Merged],
    report: Artifact[Report],
    key: Path | None = None,
) -> tuple[ReleaseFile, ...]:
    """Everything that a release consists of; the same inputs give the same bytes.

    Each layer speaks of those before it: the bill of materials of the files, the provenance of both, the signature (of
    the private key in ``key``) of the provenance, and SHA256SUMS of all.
    """
    files = [
        *stored_files(merged),
        *_notices(licence),
        *_license_files(pinned.parents),
        *(file for file in stored_files(report) if file.name == "report.html"),
        written_file(RECIPE, content.recipe),
        written_file(CARD, model_card(content, pinned.parents, licence.combination)),
    ]
    files.append(written_file(BOM, bill_of_materials(files, content, pinned.parents, licence.combination.card)))
    origin = provenance(
        files,
        recipe=list(yaml.safe_load_all(content.recipe)),
        seed=seed,
        parents=pinned.parents,
        versions={library.name: library.version for library in content.versions},
        verdict=content.verdict,
    )
    files.append(written_file(PROVENANCE, origin))
    if key is not None:
        files.append(written_file(SIGNATURE, sign(origin.encode(), key)))
    return (*files, written_file(SUMS, sums(files)))


def _notices(licence: LicenseVerdict) -> tuple[ReleaseFile, ...]:
    """NOTICE, with the sentences that the parents' licences want to stand there word for word."""
    notices = [item.text for item in licence.combination.obligations if item.kind == "notice"]
    return (written_file("NOTICE", "\n".join(notices) + "\n"),) if notices else ()


def _license_files(parents: Sequence[Parent]) -> tuple[ReleaseFile, ...]:
    """The licence texts that lie beside the parents, each under its parent's name."""
    return tuple(
        written_file(f"licenses/{parent.name.replace('/', '--')}.txt", text.read_text(errors="replace"))
        for parent in parents
        for text in [parent.directory / "LICENSE"]
        if text.is_file()
    )

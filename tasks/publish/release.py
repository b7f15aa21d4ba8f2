"""The publish step: checkpoint, card, provenance and report, together at the target or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from merge_core.store import Artifact
from tasks.licenses.check import LicenseVerdict
from tasks.merge import Merged
from tasks.pin import Parent, PinnedRecipe
from tasks.publish.card import model_card
from tasks.publish.content import ReleaseFile, content_version, stored_files, written_file
from tasks.publish.directory import publish_directory
from tasks.publish.provenance import provenance
from tasks.publish.settings import DirectoryTarget
from tasks.report import Report, ReportContent
from tasks.stage import step, store


@dataclass(frozen=True)
class Release:
    """A release where it stands. ``new`` is false when it stood there already and nothing was touched."""

    name: str
    version: str
    location: Path
    new: bool

    def summary(self) -> str:
        return f"{self.version} at {self.location.parent.name}/" if self.new else f"{self.version} is released already"


@step("publish")
def publish(
    target: DirectoryTarget,
    root: Path,
    content: ReportContent,
    pinned: PinnedRecipe,
    seed: int,
    licence: Artifact[LicenseVerdict],
    merged: Artifact[Merged],
    report: Artifact[Report],
) -> Release:
    """Publish to ``target``; relative paths relative to ``root``. Idempotent.

    Raises:
        Refused: when the version exists with other content, or the merge is not what was gated any more.
    """
    files = (
        *stored_files(merged),
        *_notices(licence.value),
        *_license_files(pinned.parents),
        *(file for file in stored_files(report) if file.name == "report.html"),
        written_file("recipe.yaml", content.recipe),
    )
    card = written_file("README.md", model_card(content, pinned.parents, licence.value.combination))
    origin = provenance(
        (*files, card),
        recipe=list(yaml.safe_load_all(content.recipe)),
        seed=seed,
        parents=pinned.parents,
        versions={library.name: library.version for library in content.versions},
        verdict=content.verdict,
    )
    everything = (*files, card, written_file("provenance.json", origin))
    version = target.version or content_version(everything)
    place = publish_directory(everything, (root / target.path).resolve(), version, store().hashes)
    return Release(content.name, place.version, place.location, place.new)


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

"""Find the releases that another release depends on: the champion, the anchor, and the merge of quantized variants.

The champion is the current release at a target, and the anchor an earlier one.

The provenance of variants names the merge's release by the sha256 of its SHA256SUMS, and by its address. The address is
untrusted. mergegate opens it automatically only if it is the place next to the variants, whose name is that of
the variants' place without its suffix: the sibling directory, or another repository of the same owner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.base.store import MANIFEST, VALUE, NotInKey, merkle
from mergegate.tasks.models.checkpoints import Model, deciding_files
from mergegate.tasks.quality.gate import ANCHOR, CHAMPION, SelectingSample
from mergegate.tasks.release.publish.content import (
    DESCRIPTION_FILES,
    MAX_METADATA_BYTES,
    PROVENANCE,
    SUMS,
    VARIANT_BUILD,
    read_document,
)
from mergegate.tasks.release.publish.targets import PublishedRelease, PublishTarget, find_release
from mergegate.tasks.release.publish.targets.directory import DirectoryRelease

_SIBLING = re.compile(r"\.\./\.\./(?P<place>[^/]+)/(?P<version>[^/]+)")
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)@[\w.-]+")


class ReleasedModel(Model):
    """A published release as a model."""

    # State of the target (see ``CurrentRelease``), if it reports one. It prevents replacing another release by mistake.
    head: Annotated[str | None, NotInKey] = None
    version: Annotated[str, NotInKey] = ""  # version name
    location: Annotated[Path | str, NotInKey] = ""  # directory or address of the release, for display
    complete: Annotated[bool, NotInKey] = True  # whether the publication was completed
    # Documents that selected the release, by task; empty if its provenance does not name them
    samples: Annotated[dict[str, SelectingSample], NotInKey] = Field(default_factory=dict)


def load_released_model(
    target: PublishTarget | None, root: Path, merge: Model, hashes: HashMemo, version: str | None = None
) -> ReleasedModel | None:
    """Return the model of the current release (the champion) or of an earlier one (the anchor), or None without one.

    If the merge is byte-identical to the release, the result has the digest of the merge, so that cached evaluations
    apply and a scheduled run with nothing new evaluates nothing.

    ``root`` is the directory of the profile, where relative paths of the target start. ``version`` is ``first`` or a
    version name for the anchor, and None for the champion.
    """
    if target is None:
        return None
    release = target.earlier_release(root, version) if version else target.current_release(root)
    if release is None:
        return None
    # Size and sha256 of every file that determines the behavior of each model, without files that only describe it.
    released_files, merged_files = (
        {
            name: ((directory / name).stat().st_size, hashes.sha256(directory / name))
            for name in deciding_files(directory)
            if name not in DESCRIPTION_FILES | {MANIFEST, VALUE}
        }
        for directory in (release.directory, merge.directory)
    )
    # List every file that a library might load with the checkpoint, so that an added file is detected, too.
    files = {path: hashes.sha256(release.directory / path) for path in deciding_files(release.directory)}
    has_same_code = all(
        released_files.get(name) == merged_files.get(name)
        for name in released_files.keys() | merged_files.keys()
        if name.endswith(".py")
    )
    return ReleasedModel(
        name=ANCHOR if version else CHAMPION,
        digest=merge.digest if released_files == merged_files else merkle(released_files),
        directory=release.directory,
        head=release.head,
        version=release.name,
        location=release.location or release.directory,
        complete=release.complete,
        files=tuple(sorted(files.items())),
        runs_code=merge.runs_code and has_same_code,
        samples=selecting_samples(release.directory),
    )


def selecting_samples(directory: Path) -> dict[str, SelectingSample]:
    """Return the documents of each task that selected the release in ``directory``, according to its provenance.

    The provenance of an older release, which does not name the start of a sample, means the beginning of the order. If
    there is no readable provenance, the result is empty, so that the next sample starts at the beginning.
    """
    try:
        statement = read_document(read_plain(directory / PROVENANCE, MAX_METADATA_BYTES, within=directory), PROVENANCE)
        guards = statement["predicate"]["mergegate_verdict"]["guards"]
        return {
            str(guard["task"]): SelectingSample(
                start=guard.get("sample_start", 0),
                documents=guard.get("documents_asked") or guard["n"],
                score=guard.get("merge_score"),
            )
            for guard in guards
        }
    except (MergegateError, LookupError, TypeError, AttributeError, ValueError):
        return {}


@dataclass(frozen=True)
class MergeLink:
    """Link from a release of variants to the release of their merge."""

    name: str  # name of the merge's release
    version: str  # version of the merge's release
    sums: str  # sha256 of its SHA256SUMS, which covers all of its files
    address: str  # its address as seen from the variants, as the provenance states it
    reference: str = ""  # release that was opened. Empty if none was.
    problem: str = ""  # why the merge's release was not checked. Empty if it was.

    @property
    def hub_id(self) -> str | None:
        match = _HUB_ID.fullmatch(self.address)
        return match["id"] if match and not self.address.startswith(".") else None

    def __str__(self) -> str:
        head = f"quantized from {self.name} {self.version}, whose release"
        if self.problem:
            return f"{head} was not checked:\n    {self.problem}"
        return f"{head} was verified, too:\n    {self.reference}"


def read_link(statement: Mapping[str, Any]) -> MergeLink | None:
    """Return the link in the provenance of variants, or None if it does not have exactly one, complete dependency."""
    try:
        (dependency,) = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        notes, sums = dependency["annotations"], dependency["digest"]["sha256"]
        link = MergeLink(dependency["name"], notes["version"], sums, notes["address"])
    except (LookupError, TypeError, ValueError):
        return None
    texts = (link.name, link.version, link.sums, link.address)
    is_complete = all(isinstance(text, str) and text for text in texts) and re.fullmatch(r"[0-9a-f]{64}", link.sums)
    return link if is_complete else None


def find_merge(
    release: PublishedRelease, link: MergeLink, reference: str | None = None
) -> PublishedRelease | MergeLink:
    """Return the release of the merge, or the link with the reason why it was not found.

    ``reference`` is the user's reference to it. None: the recorded address, if it is next to ``release``.
    """
    if reference is not None:
        return find_release(reference)
    advice = "pass it with --merge"
    if isinstance(release, DirectoryRelease):
        directory = release.directory.resolve()
        sibling = _SIBLING.fullmatch(link.address)
        if not sibling:
            return replace(link, problem=f"pass --merge {link.address} to check it")
        if not directory.parent.name.startswith(f"{sibling['place']}-"):
            return replace(link, problem=f"it is not next to these variants; {advice}")
        candidate = directory.parent.parent / sibling["place"] / sibling["version"]
        if not (candidate / PROVENANCE).is_file():
            return replace(link, problem=f"{candidate} does not exist; {advice}")
        working = Path.cwd()
        return DirectoryRelease(candidate.relative_to(working) if candidate.is_relative_to(working) else candidate)
    if not _place_of(release.reference).startswith(f"{_place_of(link.address)}-"):
        return replace(link, problem=f"{link.address} is not next to these variants; {advice}")
    try:
        return find_release(link.address)
    except InvalidInput as error:
        return replace(link, problem=f"{link.address}: {error.found}")


def require_linked(link: MergeLink, merge: PublishedRelease, statement: Mapping[str, Any]) -> None:
    """Raise Refused if ``merge``, whose provenance is ``statement``, is not the release that ``link`` names.

    ``merge`` has been verified, so that its SHA256SUMS covers its files.
    """
    definition = statement["predicate"]["buildDefinition"]
    actual = merge.files()[SUMS][1]
    if definition["buildType"] == VARIANT_BUILD:
        found = "a release of quantized variants"
    elif actual != link.sums:
        found = f"a {SUMS} with the sha256 {actual[:12]}…"
    else:
        return
    raise Refused(
        merge.reference,
        found=found,
        expected=f"the release of the merge that the variants were quantized from, {link.name} {link.version} with the "
        f"sha256 {link.sums[:12]}…",
        remedy="pass the release of that merge with --merge; variants belong to one version of a merge only",
    )


def _place_of(reference: str) -> str:
    """Return a reference without its version: 'oci://host:5000/name' for 'oci://host:5000/name:1'."""
    head, slash, name = reference.rpartition("/")
    return head + slash + re.split("[@:]", name, maxsplit=1)[0]

"""Find the release of the merge that a release of quantized variants was made from, and verify the link between them.

The provenance of variants names the merge's release by the sha256 of its SHA256SUMS, and by its address. The address is
untrusted. mergegate opens it automatically only if it is the place next to the variants, whose name is that of
the variants' place without its suffix: the sibling directory, or another repository of the same owner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.publish.content import PROVENANCE, SUMS, VARIANT_BUILD
from mergegate.tasks.publish.targets import PublishedRelease, find_release
from mergegate.tasks.publish.targets.directory import DirectoryRelease

_SIBLING = re.compile(r"\.\./\.\./(?P<place>[^/]+)/(?P<version>[^/]+)")
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)@[\w.-]+")


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
        """Id ``org/name`` of the merge's repository, or None if the address is not on the Hub."""
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

    Raises:
        InvalidInput: There is no release at ``reference``.
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

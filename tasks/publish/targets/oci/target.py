"""A repository in an OCI registry as a target, and a release that stands there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.publish.content import ReleaseFile, is_content_version
from mergegate.tasks.publish.targets.alias import is_a_version, no_such_version, require_alias_name
from mergegate.tasks.publish.targets.contract import FIRST, CurrentRelease, OnProgress, PublishTarget, Release
from mergegate.tasks.publish.targets.download import downloaded_release
from mergegate.tasks.publish.targets.oci.publication import LATEST_TAG, parse_manifest, publish_oci, version_in
from mergegate.tasks.publish.targets.oci.registry import REPOSITORY, Registry
from mergegate.tasks.store import merkle

_NAME = re.compile(
    rf"oci://(?P<repository>{REPOSITORY})(?:[:](?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
_MOST_READ = 64 << 20


class OciTarget(PublishTarget):
    """A repository in a registry: a release is a manifest, named by its digest; versions and ``latest`` are tags.

    Who may write is what ``docker login`` has noted. Tags have no guard against a second publisher.
    """

    known_as: ClassVar[str] = "oci://registry/name:version or @sha256:…"

    to: Literal["oci"]
    repository: str = Field(pattern=f"^{REPOSITORY}$", description="registry/name, such as ghcr.io/acme/demo.")
    plain_http: bool = Field(default=False, description="Speak HTTP without TLS; on the loopback that is done anyway.")

    @property
    def address(self) -> str:
        return f"oci://{self.repository}"

    def check(self, root: Path) -> None:
        """See that an upload may be begun there; it is taken back."""
        self._registry().try_upload()

    def current(self, root: Path) -> CurrentRelease | None:
        """What ``latest`` leads to, downloaded. Its head is the manifest's digest."""
        return self._downloaded(LATEST_TAG)

    def earlier(self, root: Path, named: str) -> CurrentRelease | None:
        """What the tag of a version leads to, downloaded. Tags have no order, so none of them is the first."""
        if named == FIRST:
            raise Refused(
                "evaluate.anchor",
                found=f"{FIRST!r}, and a registry, which keeps no order of its tags",
                expected="a version",
                remedy="name the version that is the anchor",
            )
        if (found := self._downloaded(named)) is None and self._registry().manifest(LATEST_TAG) is not None:
            raise InvalidInput(
                "evaluate.anchor", found=f"no tag {named!r} at {self.address}", expected="one of its tags"
            )
        return found

    def publish(
        self,
        files: Sequence[ReleaseFile],
        name: str,
        version: str,
        root: Path,
        *,
        expected_head: str | None,
        hashes: HashMemo,
        on_progress: OnProgress,
    ) -> Release:
        """Send the blobs, then the manifest under the version's tag, then under ``latest``."""
        if version == LATEST_TAG:
            raise InvalidInput("publish.version", found=repr(version), expected="another name: that tag moves")
        registry = self._registry()
        digest, new = publish_oci(files, registry, version, expected_head=expected_head, on_progress=on_progress)
        return Release(name, version, f"{self.address}@{digest}", self.address, new)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Put a tag of that name on the version's manifest. Like ``latest`` it has no guard."""
        require_alias_name(name, {LATEST_TAG})
        registry = self._registry()
        wanted, there = registry.manifest(version), registry.manifest(name)
        if wanted is None or version_in(wanted[0]) != version:
            raise no_such_version(version, self.address)
        if there is not None and version_in(there[0]) in ("", name):
            raise is_a_version(name, self.address)
        if there != wanted:
            registry.put_manifest(name, wanted[0])

    def aliased(self, root: Path, name: str) -> str | None:
        """The version that the manifest at that tag says it is."""
        there = self._registry().manifest(name)
        return (version_in(there[0]) or None) if there else None

    @classmethod
    def open(cls, named: str) -> OciRelease | None:
        """``oci://registry/name``, with a tag or a digest; without either: ``latest``."""
        return open_in_registry(named)

    def _registry(self) -> Registry:
        return Registry(self.repository, self.plain_http)

    def _downloaded(self, tag: str) -> CurrentRelease | None:
        registry = self._registry()
        if (found := registry.manifest(tag)) is None:
            return None
        where = f"{self.address}:{tag}"
        files = parse_manifest(found[0], where)

        def fetch(name: str, place: Path) -> None:
            registry.download(f"sha256:{files[name][1]}", place)

        directory = downloaded_release(where, files, fetch)
        return CurrentRelease(directory, found[1], merkle(files)[:12], f"{self.address}@{found[1]}")


@dataclass(frozen=True)
class OciRelease:
    """A manifest in a registry. ``version``: the tag that it was opened by, where that is a content hash."""

    registry: Registry
    digest: str
    version: str | None
    _files: Mapping[str, tuple[int, str]]

    @property
    def where(self) -> str:
        return f"oci://{self.registry.repository}@{self.digest[:19]}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Size and sha256 of every file: names of blobs, which the registry compared when they came.

        Raises:
            Refused: when one of them is not there any more.
        """
        for name, (_, sha256) in self._files.items():
            if not self.registry.has(f"sha256:{sha256}"):
                raise Refused(self.where, found=f"the blob of {name} is not there", expected="all of its blobs")
        return self._files

    def read(self, name: str) -> bytes:
        size, sha256 = self._files.get(name, (0, ""))
        if not sha256 or size > _MOST_READ:
            raise Refused(
                f"{self.where}: {name}", found=f"{size} bytes" if sha256 else "not there", expected="a small file"
            )
        return self.registry.blob(f"sha256:{sha256}")


def open_in_registry(named: str) -> OciRelease | None:
    """The release of that name as it stands now; None when ``named`` has another form.

    Raises:
        InvalidInput: when there is none, or the registry cannot be asked.
    """
    if not (form := _NAME.fullmatch(named)):
        return None
    registry = Registry(form["repository"])
    try:
        found = registry.manifest(form["digest"] or form["tag"] or LATEST_TAG)
        if found is None:
            raise InvalidInput(
                named, found="no such tag or digest there", expected="a release", remedy="check the spelling"
            )
        files = parse_manifest(found[0], named)
    except Refused as error:
        raise InvalidInput(named, found=error.found, expected=error.expected, remedy=error.remedy) from None
    tag = form["tag"] or ""
    return OciRelease(registry, found[1], tag if is_content_version(tag) else None, files)

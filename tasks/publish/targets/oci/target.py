"""Define the OCI target, and read releases from an OCI registry."""

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
_MAX_METADATA_BYTES = 64 << 20


class OciTarget(PublishTarget):
    """A repository in an OCI registry. A release is a manifest, named by its digest; versions and ``latest`` are tags.

    Credentials come from ``docker login``. Tags have no guard against a second publisher.
    """

    known_as: ClassVar[str] = "oci://registry/name:version or @sha256:…"

    to: Literal["oci"]
    repository: str = Field(pattern=f"^{REPOSITORY}$", description="registry/name, such as ghcr.io/acme/demo.")
    plain_http: bool = Field(default=False, description="Speak HTTP without TLS; on the loopback that is done anyway.")

    @property
    def address(self) -> str:
        return f"oci://{self.repository}"

    def check(self, root: Path) -> None:
        """Raise an error if an upload cannot be started. The upload is canceled."""
        self._registry().try_upload()

    def current(self, root: Path) -> CurrentRelease | None:
        """Download the release of ``latest``. Its head is the digest of the manifest."""
        return self._downloaded(LATEST_TAG)

    def earlier(self, root: Path, version: str) -> CurrentRelease | None:
        """Download the release of a version's tag. Tags have no order, so ``first`` is not supported."""
        if version == FIRST:
            raise Refused(
                "evaluate.anchor",
                found=f"{FIRST!r}, and a registry, which keeps no order of its tags",
                expected="a version",
                remedy="name the version that is the anchor",
            )
        if (release := self._downloaded(version)) is None and self._registry().manifest(LATEST_TAG) is not None:
            raise InvalidInput(
                "evaluate.anchor", found=f"no tag {version!r} at {self.address}", expected="one of its tags"
            )
        return release

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
        """Upload the blobs, then write the manifest under the version's tag and under ``latest``."""
        if version == LATEST_TAG:
            raise InvalidInput("publish.version", found=repr(version), expected="another name: that tag moves")
        registry = self._registry()
        digest, new = publish_oci(files, registry, version, expected_head=expected_head, on_progress=on_progress)
        return Release(name, version, f"{self.address}@{digest}", self.address, new)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Tag the version's manifest with ``name``. Like ``latest``, this tag has no guard."""
        require_alias_name(name, {LATEST_TAG})
        registry = self._registry()
        desired, current = registry.manifest(version), registry.manifest(name)
        if desired is None or version_in(desired[0]) != version:
            raise no_such_version(version, self.address)
        if current is not None and version_in(current[0]) in ("", name):
            raise is_a_version(name, self.address)
        if current != desired:
            registry.put_manifest(name, desired[0])

    def aliased(self, root: Path, name: str) -> str | None:
        """Return the version in the manifest that the tag ``name`` leads to."""
        manifest = self._registry().manifest(name)
        return (version_in(manifest[0]) or None) if manifest else None

    @classmethod
    def open(cls, reference: str) -> OciRelease | None:
        """Open ``oci://registry/name`` with a tag or a digest. Default: the tag ``latest``."""
        return open_in_registry(reference)

    def _registry(self) -> Registry:
        return Registry(self.repository, self.plain_http)

    def _downloaded(self, tag: str) -> CurrentRelease | None:
        registry = self._registry()
        if (manifest := registry.manifest(tag)) is None:
            return None
        location = f"{self.address}:{tag}"
        files = parse_manifest(manifest[0], location)

        def fetch(name: str, path: Path) -> None:
            registry.download(f"sha256:{files[name][1]}", path)

        directory = downloaded_release(location, files, fetch)
        return CurrentRelease(directory, manifest[1], merkle(files)[:12], f"{self.address}@{manifest[1]}")


@dataclass(frozen=True)
class OciRelease:
    """A manifest in a registry. ``version`` is the tag that it was opened by, if that is a content hash."""

    registry: Registry
    digest: str
    version: str | None
    _files: Mapping[str, tuple[int, str]]

    @property
    def where(self) -> str:
        return f"oci://{self.registry.repository}@{self.digest[:19]}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Return size and sha256 of every file. The registry verified each blob against its digest on upload.

        Raises:
            Refused: A blob is no longer available.
        """
        for name, (_, sha256) in self._files.items():
            if not self.registry.has(f"sha256:{sha256}"):
                raise Refused(self.where, found=f"the blob of {name} is not there", expected="all of its blobs")
        return self._files

    def read(self, name: str) -> bytes:
        size, sha256 = self._files.get(name, (0, ""))
        if not sha256 or size > _MAX_METADATA_BYTES:
            raise Refused(
                f"{self.where}: {name}", found=f"{size} bytes" if sha256 else "not there", expected="a small file"
            )
        return self.registry.blob(f"sha256:{sha256}")


def open_in_registry(reference: str) -> OciRelease | None:
    """Open the release that a reference names, in its present state. Return None if the reference has another form.

    Raises:
        InvalidInput: There is no such release, or the registry is unavailable.
    """
    if not (match := _NAME.fullmatch(reference)):
        return None
    registry = Registry(match["repository"])
    try:
        manifest = registry.manifest(match["digest"] or match["tag"] or LATEST_TAG)
        if manifest is None:
            raise InvalidInput(
                reference, found="no such tag or digest there", expected="a release", remedy="check the spelling"
            )
        files = parse_manifest(manifest[0], reference)
    except Refused as error:
        raise InvalidInput(reference, found=error.found, expected=error.expected, remedy=error.remedy) from None
    tag = match["tag"] or ""
    return OciRelease(registry, manifest[1], tag if is_content_version(tag) else None, files)

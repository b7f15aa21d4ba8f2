"""Define the OCI target: content-addressed blobs, one manifest, a tag for the version, and the moving tag ``latest``.

The digest of the manifest identifies the release: the same files give the same digest for every publisher. A registry
rejects a manifest whose blobs are missing and a blob whose hash differs from its name, so a tag always points to a
complete release.

**Writing a tag has no guard**, because registries ignore ``If-Match``. If two publishers read ``latest`` before either
writes it, the last one wins, and neither is notified. mergegate reduces the risk: it reads ``latest`` directly before
and after it writes, and writes a version's tag only if it does not exist. If that is not enough, publish from one place
or to a target with guarded writes (S3, the Hub).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.publish.content import (
    MAX_METADATA_BYTES,
    VERSION_DIGITS,
    content_digest,
    file_identities,
    is_content_version,
)
from mergegate.tasks.publish.targets.contract import (
    FIRST,
    CurrentRelease,
    PublicationBlocked,
    PublishRequest,
    PublishTarget,
    Release,
    alias_conflict,
    no_such_version,
    overtaken,
    require_alias_name,
    version_taken,
)
from mergegate.tasks.publish.targets.download import download_release
from mergegate.tasks.publish.targets.oci_registry import MANIFEST_TYPE, REPOSITORY, Registry, digest_of

_NAME = re.compile(
    rf"oci://(?P<repository>{REPOSITORY})(?:[:](?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
_LATEST = "latest"
_ARTIFACT_TYPE = "application/vnd.mergegate.release.v1"
_TITLE = "org.opencontainers.image.title"
_VERSION = "org.opencontainers.image.version"
_EMPTY = b"{}"  # content of the config blob, which the specification requires
_ROUNDS = 20
_SHOWN_DIGITS = 19  # leading characters of a digest in a message: 'sha256:' and 12 digits


class OciTarget(PublishTarget):
    """A repository in an OCI registry. A release is a manifest, named by its digest; versions and ``latest`` are tags.

    Credentials come from ``docker login``. Tags have no guard against a second publisher.
    """

    reference_form: ClassVar[str] = "oci://registry/name:version or @sha256:…"

    to: Literal["oci"]
    repository: str = Field(
        pattern=f"^{REPOSITORY}$", description="Repository registry/name, such as ghcr.io/acme/demo."
    )
    plain_http: bool = Field(
        default=False,
        description="Use HTTP without TLS. Always the case on the loopback interface. Default: false.",
    )

    @property
    def address(self) -> str:
        return f"oci://{self.repository}"

    def check(self, root: Path) -> None:
        """Raise an error if the registry denies write access. This starts and cancels an upload."""
        registry = self._registry()
        upload = registry.ask("POST", "/blobs/uploads/", content=b"", expected=(202,))
        with suppress(Refused):
            registry.ask("DELETE", upload.headers["location"], expected=range(200, 500))

    def current_release(self, root: Path) -> CurrentRelease | None:
        """Download the release tagged ``latest``. Its ``head`` is the digest of the manifest."""
        return self._download(_LATEST)

    def earlier_release(self, root: Path, version: str) -> CurrentRelease | None:
        """Download the release with a version's tag. ``first`` is not supported, because tags have no order."""
        if version == FIRST:
            raise Refused(
                "evaluate.anchor",
                found=f"{FIRST!r}, but a registry does not store the order of its tags",
                expected="the name of a version",
                remedy="set 'anchor' to the name of a version",
            )
        if (release := self._download(version)) is None and self._registry().manifest(_LATEST) is not None:
            raise InvalidInput(
                "evaluate.anchor", found=f"no tag {version!r} at {self.address}", expected="one of its tags"
            )
        return release

    def current_head(self, root: Path) -> str | None:
        """Return the digest of the manifest that is tagged ``latest``, or None before the first release."""
        manifest = self._registry().manifest(_LATEST)
        return manifest[1] if manifest else None

    def reference_to(self, version: str) -> str:
        """Return the reference with the version's tag."""
        return f"{self.address}:{version}"

    def for_variants(self, suffix: str) -> OciTarget:
        """Return the repository next to this one, such as ``ghcr.io/acme/demo-gguf``. Its name is lowercase."""
        return self._with_settings(suffix, repository=f"{self.repository}-{suffix.lower()}")

    def publish(self, request: PublishRequest) -> Release:
        """Upload the blobs, then write the manifest under the version's tag and under ``latest``.

        Raises:
            Refused: The version exists with different content, ``latest`` has moved, a source file has changed since
                the gate, or the registry rejects a request, does not answer, or does not store the files.
        """
        version, expected_head = request.version, request.expected_head
        if version == _LATEST:
            raise InvalidInput(
                "publish.version",
                found=repr(version),
                expected="another name, because this tag moves with every release",
                remedy="choose another name for the version",
            )
        registry = self._registry()
        content = release_manifest(version, file_identities(request.files))
        digest, has_changed, previous = digest_of(content), False, ""
        for _ in range(_ROUNDS):
            observed = _observe(request, registry)
            expected_head = observed.latest if expected_head is None else expected_head
            write = _next_oci_write(digest, version, observed, expected_head)
            if isinstance(write, PublicationBlocked):
                raise write.refusal(registry.repository)
            if write == "done":
                return Release(request.name, version, f"{self.address}@{digest}", self.address, has_changed)
            if write == previous:
                raise Refused(
                    registry.repository,
                    found=f"the registry's content differs from the sent content ({write})",
                    expected="the bytes that were evaluated and gated",
                    remedy="run again; if the error persists, find out who else writes to the repository",
                )
            has_changed, previous = True, write
            if write != "blobs":
                registry.put_manifest(version if write == "version" else _LATEST, content)
                continue
            by_digest = {f"sha256:{file.sha256}": file for file in request.files}
            sent, total = 0, sum(by_digest[blob].size for blob in observed.missing if blob in by_digest)
            request.on_progress(sent, total)
            for blob in observed.missing:
                if (file := by_digest.get(blob)) is None:
                    registry.put_blob(blob, _EMPTY, len(_EMPTY))
                    continue
                if isinstance(file.source, Path):
                    try:
                        size = file.source.stat().st_size
                    except OSError:
                        raise file.alteration_error() from None
                    if size != file.size:
                        raise file.alteration_error(problem=f"{size} bytes instead of {file.size}")
                received = registry.put_blob(blob, file.source, file.size)
                if received != blob:
                    raise file.alteration_error(received.partition(":")[2])
                sent += file.size
                request.on_progress(sent, total)
        raise AssertionError("each write is taken once")

    def published_file(self, root: Path, version: str, name: str) -> bytes | None:
        """Return a small file of the manifest with a version's tag, or None."""
        registry = self._registry()
        if (manifest := registry.manifest(version)) is None:
            return None
        files = parse_manifest(manifest[0], self.reference_to(version))
        return OciRelease(registry, manifest[1], None, files).read(name) if name in files else None

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Tag the version's manifest with ``name``. Like ``latest``, this tag has no guard."""
        require_alias_name(name, {_LATEST})
        registry = self._registry()
        desired, current = registry.manifest(version), registry.manifest(name)
        if desired is None or _manifest_version(desired[0]) != version:
            raise no_such_version(version, self.address)
        if current is not None and _manifest_version(current[0]) in ("", name):
            raise alias_conflict(name, self.address)
        if current != desired:
            registry.put_manifest(name, desired[0])

    def resolve_alias(self, root: Path, name: str) -> str | None:
        """Return the version in the manifest with the tag ``name``, or None."""
        manifest = self._registry().manifest(name)
        return (_manifest_version(manifest[0]) or None) if manifest else None

    @classmethod
    def open(cls, reference: str) -> OciRelease | None:
        """Open ``oci://registry/name`` with a tag or a digest. Default: the tag ``latest``."""
        if not (match := _NAME.fullmatch(reference)):
            return None
        registry = Registry(match["repository"])
        try:
            manifest = registry.manifest(match["digest"] or match["tag"] or _LATEST)
            if manifest is None:
                raise InvalidInput(
                    reference,
                    found="no such tag or digest in the registry",
                    expected="a release",
                    remedy="check the spelling",
                )
            files = parse_manifest(manifest[0], reference)
        except Refused as error:
            raise InvalidInput(reference, found=error.found, expected=error.expected, remedy=error.remedy) from None
        tag = match["tag"] or ""
        return OciRelease(registry, manifest[1], tag if is_content_version(tag) else None, files)

    def _registry(self) -> Registry:
        return Registry(self.repository, self.plain_http)

    def _download(self, tag: str) -> CurrentRelease | None:
        registry = self._registry()
        if (manifest := registry.manifest(tag)) is None:
            return None
        files = parse_manifest(manifest[0], f"{self.address}:{tag}")
        version = content_digest(files)[:VERSION_DIGITS]
        directory = OciRelease(registry, manifest[1], version, files).download()
        return CurrentRelease(directory, manifest[1], version, f"{self.address}@{manifest[1]}")


@dataclass(frozen=True)
class OciRelease:
    """A release in a registry. ``version`` is the tag with which it was opened if that is a content hash, or None."""

    registry: Registry
    digest: str
    version: str | None
    _files: Mapping[str, tuple[int, str]]

    @property
    def reference(self) -> str:
        return f"oci://{self.registry.repository}@{self.digest[:_SHOWN_DIGITS]}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Return size and sha256 of every file, as the registry verified them. Raise Refused if a blob is missing."""
        for name, (_, sha256) in self._files.items():
            if not self.registry.has(f"sha256:{sha256}"):
                raise Refused(self.reference, found=f"the blob of {name} is missing", expected="all of its blobs")
        return self._files

    def read(self, name: str) -> bytes:
        size, sha256 = self._files.get(name, (0, ""))
        if not sha256 or size > MAX_METADATA_BYTES:
            problem = f"{size} bytes" if sha256 else "the file is missing"
            raise Refused(f"{self.reference}: {name}", found=problem, expected="a small file")
        return self.registry.blob(f"sha256:{sha256}")

    def download(self) -> Path:
        """Return a directory with the release. Raise Refused if its blobs differ from the manifest."""

        def fetch(name: str, path: Path) -> None:
            self.registry.download(f"sha256:{self._files[name][1]}", path)

        return download_release(self.reference, self._files, fetch)


def release_manifest(version: str, files: Mapping[str, tuple[int, str]]) -> bytes:
    """Return the manifest of a release: one layer per file, titled with the file's name.

    ``files`` holds the size in bytes and the sha256 of each file, by name. The same files give the same bytes.
    """
    layers = [
        {
            "mediaType": "application/octet-stream",
            "digest": f"sha256:{sha256}",
            "size": size,
            "annotations": {_TITLE: name},
        }
        for name, (size, sha256) in sorted(files.items())
    ]
    empty_type = "application/vnd.oci.empty.v1+json"
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": _ARTIFACT_TYPE,
        "config": {"mediaType": empty_type, "digest": digest_of(_EMPTY), "size": len(_EMPTY)},
        "layers": layers,
        "annotations": {_VERSION: version},
    }
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def parse_manifest(content: bytes, location: str) -> dict[str, tuple[int, str]]:
    """Return size in bytes and sha256 of each file by name. Raise Refused if it is not a release's manifest."""
    try:
        manifest: dict[str, Any] = json.loads(content)
        if manifest["artifactType"] != _ARTIFACT_TYPE:
            raise ValueError(f"its artifactType is {manifest['artifactType']}")
        files = {}
        for layer in manifest["layers"]:
            kind, _, sha256 = str(layer["digest"]).partition(":")
            if kind != "sha256":
                raise ValueError(f"it has a digest of another kind ({kind})")
            files[str(layer["annotations"][_TITLE])] = int(layer["size"]), sha256
        return files
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            location, found=f"not a release of mergegate: {error}", expected="a manifest that mergegate wrote"
        ) from None


def _manifest_version(content: bytes) -> str:
    """Return the version in a manifest, or an empty string if mergegate did not write the manifest."""
    try:
        manifest: dict[str, Any] = json.loads(content)
        return str(manifest["annotations"][_VERSION]) if manifest["artifactType"] == _ARTIFACT_TYPE else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


@dataclass(frozen=True)
class _ObservedTags:
    """Digests of ``latest`` and of the version's tag (empty: no tag), and digests of the missing blobs."""

    latest: str
    version: str
    missing: tuple[str, ...]


def _observe(request: PublishRequest, registry: Registry) -> _ObservedTags:
    latest, tagged = (manifest[1] if (manifest := registry.manifest(tag)) else "" for tag in (_LATEST, request.version))
    digests = dict.fromkeys([f"sha256:{file.sha256}" for file in request.files] + [digest_of(_EMPTY)])
    return _ObservedTags(latest, tagged, tuple(digest for digest in digests if not registry.has(digest)))


def _next_oci_write(
    digest: str, version: str, observed_state: _ObservedTags, expected_head: str
) -> Literal["blobs", "version", "latest", "done"] | PublicationBlocked:
    """Return what to write next, or why writing would break a guarantee.

    ``digest`` is that of the manifest. ``expected_head`` is the digest of ``latest`` when the release was compared.
    """
    if observed_state.version not in ("", digest):
        return version_taken(version, observed_state.version[:_SHOWN_DIGITS])
    if observed_state.latest not in (expected_head, digest):
        return overtaken(
            f"another release ({observed_state.latest[:_SHOWN_DIGITS] or 'none'}) is current there now",
            "the release that this one was compared with",
        )
    if observed_state.missing:
        return "blobs"
    if observed_state.version != digest:
        return "version"
    return "latest" if observed_state.latest != digest else "done"

"""Publish to an OCI registry: content-addressed blobs, one manifest, a tag for the version, and the moving ``latest``.

The digest of the manifest identifies the release: the same files give the same digest for every publisher. A
registry rejects a manifest whose blobs are missing and a blob whose hash differs from its name, so a tag always leads
to a complete release.

**Tags have no guard.** Registries ignore ``If-Match``: if two publishers read before either writes, ``latest`` of the
last one stays, and neither is notified. mergegate reduces the risk: it reads ``latest`` directly before writing and
again afterwards, and writes a version's tag only if it does not exist. Where that is not enough, publish from one place
or to a target with a guard (S3, the Hub).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.errors import Refused
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.targets.contract import OnProgress
from mergegate.tasks.publish.targets.oci.registry import MANIFEST_TYPE, Registry, digest_of

LATEST_TAG = "latest"
ARTIFACT_TYPE = "application/vnd.mergegate.release.v1"
NO_TAG = ""  # the head of a repository without ``latest``
_TITLE = "org.opencontainers.image.title"
_VERSION = "org.opencontainers.image.version"
_EMPTY = b"{}"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_ROUNDS = 20


@dataclass(frozen=True)
class ObservedTags:
    """State of the repository: digests of ``latest`` and of the version's tag, and the missing blobs."""

    latest: str
    tagged: str
    missing: tuple[str, ...]


def release_manifest(version: str, files: Mapping[str, tuple[int, str]]) -> bytes:
    """Return the deterministic manifest of a release: one layer per file, titled with the file's name.

    Args:
        files: Size in bytes and sha256 of each file, by name.
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
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": _EMPTY_TYPE, "digest": digest_of(_EMPTY), "size": len(_EMPTY)},
        "layers": layers,
        "annotations": {_VERSION: version},
    }
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def parse_manifest(content: bytes, location: str) -> dict[str, tuple[int, str]]:
    """Return size in bytes and sha256 of each file in a manifest, by name.

    Raises:
        Refused: The manifest is not that of a release.
    """
    try:
        manifest: dict[str, Any] = json.loads(content)
        if manifest["artifactType"] != ARTIFACT_TYPE:
            raise ValueError(f"a {manifest['artifactType']}")
        files = {}
        for layer in manifest["layers"]:
            kind, _, sha256 = str(layer["digest"]).partition(":")
            if kind != "sha256":
                raise ValueError(f"a digest of another kind ({kind})")
            files[str(layer["annotations"][_TITLE])] = int(layer["size"]), sha256
        return files
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            location, found=f"no release of mergegate: {error}", expected="what a publication has written"
        ) from None


def version_in(content: bytes) -> str:
    """Return the version in a manifest, or an empty string if mergegate did not write the manifest."""
    try:
        manifest: dict[str, Any] = json.loads(content)
        return str(manifest["annotations"][_VERSION]) if manifest["artifactType"] == ARTIFACT_TYPE else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def next_write(digest: str, observed: ObservedTags, expected_head: str) -> str | Refused:
    """Return what to write next (``blobs``, ``version`` or ``latest``), ``done``, or the reason for a refusal.

    Args:
        digest: Digest of the manifest.
        expected_head: Digest of ``latest`` when the release was compared.
    """
    if observed.tagged not in ("", digest):
        return Refused(
            "",
            found=f"the version is already published with other content ({observed.tagged[:19]})",
            expected="a version that never changes",
            remedy="publish under a new version",
        )
    if observed.latest not in (expected_head, digest):
        return Refused(
            "",
            found=f"another release ({observed.latest[:19] or 'none'}) is current there now",
            expected="the one that this release was compared with",
            remedy="run again: it is judged anew, against what is published now",
        )
    if observed.missing:
        return "blobs"
    if observed.tagged != digest:
        return "version"
    return "latest" if observed.latest != digest else "done"


def publish_oci(
    files: Sequence[ReleaseFile],
    registry: Registry,
    version: str,
    *,
    expected_head: str | None,
    on_progress: OnProgress,
) -> tuple[str, bool]:
    """Point the tags ``version`` and ``latest`` to a manifest of exactly ``files``. Idempotent.

    Args:
        expected_head: Digest of ``latest`` when the release was compared. None: any digest is accepted.

    Returns:
        Digest of the manifest, and whether anything changed.

    Raises:
        Refused: The version exists with different content, ``latest`` has moved, a source file has changed since the
            gate, or the registry rejects a request, does not answer, or does not store the files.
    """
    content = release_manifest(version, {file.name: (file.size, file.sha256) for file in files})
    digest, changed, previous = digest_of(content), False, ""
    for _ in range(_ROUNDS):
        observed = _look(files, registry, version)
        expected_head = observed.latest if expected_head is None else expected_head
        write = next_write(digest, observed, expected_head)
        if isinstance(write, Refused):
            raise Refused(registry.repository, found=write.found, expected=write.expected, remedy=write.remedy)
        if write == "done":
            return digest, changed
        if write == previous:
            raise Refused(
                registry.repository,
                found=f"what the registry holds afterwards is not what was sent ({write})",
                expected="the bytes that were evaluated and gated",
                remedy="run again; see who else writes there",
            )
        if write == "blobs":
            _send(files, registry, observed.missing, on_progress)
        else:
            registry.put_manifest(version if write == "version" else LATEST_TAG, content)
        changed, previous = True, write
    raise AssertionError("each write is taken once")


def _look(files: Sequence[ReleaseFile], registry: Registry, version: str) -> ObservedTags:
    tags = [manifest[1] if (manifest := registry.manifest(tag)) else NO_TAG for tag in (version, LATEST_TAG)]
    digests = dict.fromkeys([f"sha256:{file.sha256}" for file in files] + [digest_of(_EMPTY)])
    return ObservedTags(tags[1], tags[0], tuple(digest for digest in digests if not registry.has(digest)))


def _send(files: Sequence[ReleaseFile], registry: Registry, missing: Sequence[str], on_progress: OnProgress) -> None:
    by_digest = {f"sha256:{file.sha256}": file for file in files}
    sent, total = 0, sum(by_digest[digest].size for digest in missing if digest in by_digest)
    on_progress(sent, total)
    for digest in missing:
        if (file := by_digest.get(digest)) is None:
            registry.put_blob(digest, _EMPTY, len(_EMPTY))
            continue
        try:
            matches = isinstance(file.source, bytes) or file.source.stat().st_size == file.size
        except OSError:
            matches = False
        received = registry.put_blob(digest, file.source, file.size) if matches else "sha256:of another size"
        if received != digest:
            raise file.altered(received.partition(":")[2])
        sent += file.size
        on_progress(sent, total)

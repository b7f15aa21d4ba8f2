"""Publishing to a registry: blobs by their hash, one manifest over them, a tag for the version, and one that moves.

The manifest's digest is the release: same files, same digest, whoever publishes. A registry refuses a manifest whose
blobs it lacks and a blob that has another hash than its name, so what a tag leads to is always whole.

**A tag has no guard.** Registries ignore ``If-Match``: of two publishers who both looked before either wrote, the last
one's ``latest`` stays, and nobody is told. What can be done is done: ``latest`` is looked at directly before it is
written and again afterwards, and a version's tag is written only where there is none. Publish from one place, or to a
target that has a guard (S3, the Hub), where that is not enough.
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
    """The repository as it is now: what ``latest`` and the version's tag lead to, and which blobs are not there."""

    latest: str
    tagged: str
    missing: tuple[str, ...]


def release_manifest(version: str, files: Mapping[str, tuple[int, str]]) -> bytes:
    """The manifest of a release: a layer for each file (name -> size, sha256), titled with its name; always alike."""
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


def parse_manifest(content: bytes, where: str) -> dict[str, tuple[int, str]]:
    """Name -> size in bytes, sha256.

    Raises:
        Refused: when it is the manifest of something else.
    """
    try:
        manifest: dict[str, Any] = json.loads(content)
        if manifest["artifactType"] != ARTIFACT_TYPE:
            raise ValueError(f"a {manifest['artifactType']}")
        found = {}
        for layer in manifest["layers"]:
            kind, _, sha256 = str(layer["digest"]).partition(":")
            if kind != "sha256":
                raise ValueError(f"a digest of another kind ({kind})")
            found[str(layer["annotations"][_TITLE])] = int(layer["size"]), sha256
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            where, found=f"no release of mergegate: {error}", expected="what a publication has written"
        ) from None


def version_in(content: bytes) -> str:
    """The version that a manifest says it is; empty where it is none of ours."""
    try:
        manifest: dict[str, Any] = json.loads(content)
        return str(manifest["annotations"][_VERSION]) if manifest["artifactType"] == ARTIFACT_TYPE else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def next_write(digest: str, observed: ObservedTags, expected_head: str) -> str | Refused:
    """``blobs``, ``version``, ``latest`` or ``done``: what to write now; or why not.

    Args:
        digest: Of the manifest.
        expected_head: What ``latest`` led to when the release was judged.
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
    """Make the tag ``version``, and ``latest``, lead to a manifest of exactly ``files``. Idempotent.

    Args:
        expected_head: Digest that ``latest`` led to when the release was compared; None: whatever it does now.

    Returns:
        The manifest's digest, and whether anything was changed.

    Raises:
        Refused: when the version exists with other content, ``latest`` was moved meanwhile, a source is not what was
            gated, or the registry says no, does not answer or does not keep what was sent.
    """
    content = release_manifest(version, {file.name: (file.size, file.sha256) for file in files})
    digest, changed, before = digest_of(content), False, ""
    for _ in range(_ROUNDS):
        observed = _look(files, registry, version)
        expected_head = observed.latest if expected_head is None else expected_head
        write = next_write(digest, observed, expected_head)
        if isinstance(write, Refused):
            raise Refused(registry.repository, found=write.found, expected=write.expected, remedy=write.remedy)
        if write == "done":
            return digest, changed
        if write == before:
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
        changed, before = True, write
    raise AssertionError("each write is taken once")


def _look(files: Sequence[ReleaseFile], registry: Registry, version: str) -> ObservedTags:
    tags = [found[1] if (found := registry.manifest(tag)) else NO_TAG for tag in (version, LATEST_TAG)]
    wanted = dict.fromkeys([f"sha256:{file.sha256}" for file in files] + [digest_of(_EMPTY)])
    return ObservedTags(tags[1], tags[0], tuple(digest for digest in wanted if not registry.has(digest)))


def _send(files: Sequence[ReleaseFile], registry: Registry, missing: Sequence[str], on_progress: OnProgress) -> None:
    by_digest = {f"sha256:{file.sha256}": file for file in files}
    done, total = 0, sum(by_digest[digest].size for digest in missing if digest in by_digest)
    on_progress(done, total)
    for digest in missing:
        if (file := by_digest.get(digest)) is None:
            registry.put_blob(digest, _EMPTY, len(_EMPTY))
            continue
        try:
            there = isinstance(file.source, bytes) or file.source.stat().st_size == file.size
        except OSError:
            there = False
        found = registry.put_blob(digest, file.source, file.size) if there else "sha256:of another size"
        if found != digest:
            raise file.altered(found.partition(":")[2])
        done += file.size
        on_progress(done, total)

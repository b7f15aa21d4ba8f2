"""Define the files of a release: name, size, hash, and content from the store or written for the release."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import Refused
from mergegate.tasks.store import MANIFEST, VALUE, Artifact, merkle

CARD = "README.md"
RECIPE = "recipe.yaml"
BOM = "bom.json"
PROVENANCE = "provenance.json"
SIGNATURE = "model.sig"
SUMS = "SHA256SUMS"
# JSON files in a release that describe the checkpoint and are not part of it.
ABOUT = frozenset({BOM, PROVENANCE})
_CONTENT_VERSION = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class ReleaseFile:
    """One file of a release. ``source`` is a path, or the content itself."""

    name: str  # relative, with forward slashes
    size: int
    sha256: str
    source: Path | bytes

    def read(self) -> bytes:
        """Return the whole content."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    def altered(self, found: str) -> Refused:
        """Return the error for a source that is missing or has the sha256 ``found`` instead of the gated one."""
        return Refused(
            str(self.source),
            found=f"sha256 {found[:12]}…",
            expected=f"{self.sha256[:12]}…, the bytes that were evaluated and gated",
            remedy="run again: the altered artifact is noticed and rebuilt",
        )


def stored_files(artifact: Artifact[Any]) -> tuple[ReleaseFile, ...]:
    """Return the files of an artifact without the store's own bookkeeping files."""
    return tuple(
        ReleaseFile(name, (artifact.directory / name).stat().st_size, sha256, artifact.directory / name)
        for name, sha256 in sorted(artifact.files.items())
        if name not in (MANIFEST, VALUE)
    )


def written_file(name: str, text: str) -> ReleaseFile:
    """Return a file with text written for the release."""
    data = text.encode()
    return ReleaseFile(name, len(data), hashlib.sha256(data).hexdigest(), data)


def content_version(files: Iterable[ReleaseFile]) -> str:
    """Return a version that is a content hash: the first 12 hex digits of the Merkle digest over all files."""
    return content_version_from_sums({file.name: (file.size, file.sha256) for file in files})


def content_version_from_sums(files: Mapping[str, tuple[int, str]]) -> str:
    """Return the content version for a mapping of file name to (size, sha256)."""
    return merkle(files)[:12]


def is_content_version(name: str) -> bool:
    """Return whether ``name`` has the form of a content version. If not, a user chose it."""
    return _CONTENT_VERSION.fullmatch(name) is not None

"""What a release consists of: named files with size and hash, some lying in the store, some written for the release."""

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
# JSON beside a checkpoint in a release that is about it, not part of it.
ABOUT = frozenset({BOM, PROVENANCE})
_CONTENT_VERSION = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class ReleaseFile:
    """One file of a release. ``source`` is where its bytes lie, or the bytes themselves."""

    name: str  # relative, with forward slashes
    size: int
    sha256: str
    source: Path | bytes

    def read(self) -> bytes:
        """All of its bytes."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    def altered(self, found: str) -> Refused:
        """What to say when the source is not what was gated, but has the sha256 ``found``, or is not there."""
        return Refused(
            str(self.source),
            found=f"sha256 {found[:12]}…",
            expected=f"{self.sha256[:12]}…, the bytes that were evaluated and gated",
            remedy="run again: the altered artifact is noticed and rebuilt",
        )


def stored_files(artifact: Artifact[Any]) -> tuple[ReleaseFile, ...]:
    """The files of an artifact, without the store's own bookkeeping."""
    return tuple(
        ReleaseFile(name, (artifact.directory / name).stat().st_size, sha256, artifact.directory / name)
        for name, sha256 in sorted(artifact.files.items())
        if name not in (MANIFEST, VALUE)
    )


def written_file(name: str, text: str) -> ReleaseFile:
    """A file made for the release."""
    data = text.encode()
    return ReleaseFile(name, len(data), hashlib.sha256(data).hexdigest(), data)


def content_version(files: Iterable[ReleaseFile]) -> str:
    """A version that is the content: the first 12 hex digits of the Merkle digest over all files."""
    return content_version_from_sums({file.name: (file.size, file.sha256) for file in files})


def content_version_from_sums(files: Mapping[str, tuple[int, str]]) -> str:
    """The same from name -> (size, sha256) of all files."""
    return merkle(files)[:12]


def is_content_version(name: str) -> bool:
    """Whether ``name`` can be such a version, rather than one that a person chose."""
    return _CONTENT_VERSION.fullmatch(name) is not None

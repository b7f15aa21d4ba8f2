"""What a release consists of: named files with size and hash, some lying in the store, some written for the release."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merge_core.store import MANIFEST, VALUE, Artifact, merkle

CARD = "README.md"
RECIPE = "recipe.yaml"
BOM = "bom.json"
PROVENANCE = "provenance.json"
SIGNATURE = "model.sig"
SUMS = "SHA256SUMS"
# JSON beside a checkpoint in a release that is about it, not part of it.
ABOUT = frozenset({BOM, PROVENANCE})


@dataclass(frozen=True)
class ReleaseFile:
    """One file of a release. ``source`` is where its bytes lie, or the bytes themselves."""

    name: str  # relative, with forward slashes
    size: int
    sha256: str
    source: Path | bytes


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
    return merkle({file.name: (file.size, file.sha256) for file in files})[:12]

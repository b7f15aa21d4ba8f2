"""Define the files that describe stored content: the manifest of an artifact and the record of a value."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MANIFEST = "manifest.json"


class ListedFile(BaseModel):
    """Size in bytes and sha256 of a file."""

    model_config = ConfigDict(strict=True, frozen=True)

    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ArtifactManifest(BaseModel):
    """Content of ``manifest.json``: the key, a digest of all content, and every file. Parsed strictly."""

    model_config = ConfigDict(strict=True, frozen=True)

    key: str
    digest: str
    files: dict[str, ListedFile]


class ValueRecord(BaseModel):
    """Stored result of a stage that writes no files. ``sha256`` is the digest of ``value`` as stored."""

    model_config = ConfigDict(strict=True, frozen=True)

    key: str
    digest: str
    sha256: str
    value: Any

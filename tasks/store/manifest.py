"""What lies beside an artifact's files and vouches for them: its manifest; and the file of a value that has none."""

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
    """``manifest.json``, strictly: the key, a digest of all content, every file."""

    model_config = ConfigDict(strict=True, frozen=True)

    key: str
    digest: str
    files: dict[str, ListedFile]


class ValueRecord(BaseModel):
    """The file of a stage whose value is all that it makes; ``sha256`` is the digest of ``value`` as it stands."""

    model_config = ConfigDict(strict=True, frozen=True)

    key: str
    digest: str
    sha256: str
    value: Any

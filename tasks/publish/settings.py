"""Where a release goes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DirectoryTarget(BaseModel):
    """A directory that holds every version of the release and a link to the latest one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    to: Literal["directory"] = "directory"
    path: Path
    version: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of this version; absent: the first 12 digits of its content hash.",
    )

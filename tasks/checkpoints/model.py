"""A model as the stages see it: a name for people, a digest for keys, a directory for whoever reads the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from merge_core.store import NotInKey


class Model(BaseModel):
    """A checkpoint with known content.

    Two models with equal digests are the same model, whatever they are called and wherever they lie; so a parent is
    evaluated once, ever.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, NotInKey]  # unique in a run: 'reverser', 'merge'
    digest: str  # 64 hex digits over names, sizes and hashes of the files that matter
    directory: Annotated[Path, NotInKey]  # absolute

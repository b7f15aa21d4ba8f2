"""Files of what was measured of a model: tensors, and a JSON that says by which of them each name is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint.safetensors_file import StoredTensor, read_header
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json


def write_owners(place: Path, key: str, owners: Mapping[str, str], positions: int) -> None:
    """Write ``{"positions": ..., key: owners}``; means are over so many positions."""
    text = json.dumps({"positions": positions, key: dict(owners)}, indent=1)
    place.write_text(f"{text}\n", encoding="utf-8")


def read_owners(place: Path, key: str, pattern: str, expected: str) -> dict[str, StoredTensor | None]:
    """The tensors of the files ``pattern`` beside ``place``, by the names that it says; None where one is not there.

    Raises:
        InvalidInput: Files that are missing or damaged; ``expected`` is what they should be.
    """
    said: Any = read_json(place)
    owners = said.get(key) if isinstance(said, Mapping) else None
    kept = {tensor.name: tensor for file in sorted(place.parent.glob(pattern)) for tensor in read_header(file)}
    if not isinstance(owners, Mapping):
        raise InvalidInput(str(place), found=f"no {key!r}", expected=expected, remedy="run again")
    return {str(name): kept.get(owner) for name, owner in owners.items()}

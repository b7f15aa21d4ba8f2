"""Read and write measurements of a model: tensors, and a JSON file that maps names to these tensors.

Several names can share one stored tensor, which is their owner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint.safetensors_file import StoredTensor, read_header
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json


def write_owners(path: Path, key: str, owners: Mapping[str, str], positions: int) -> None:
    """Write ``{"positions": ..., key: owners}``. ``positions`` is the number of positions that the means cover."""
    text = json.dumps({"positions": positions, key: dict(owners)}, indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")


def read_owners(path: Path, key: str, pattern: str, expected: str) -> dict[str, StoredTensor | None]:
    """Return the stored tensor for each name in a JSON file, or None if the tensor is missing.

    Args:
        path: The JSON file.
        key: Key of the mapping in the JSON file.
        pattern: Glob pattern of the tensor files in the same directory.
        expected: Description of the expected content for error messages.

    Raises:
        InvalidInput: A file is missing or damaged.
    """
    content: Any = read_json(path)
    owners = content.get(key) if isinstance(content, Mapping) else None
    tensors = {tensor.name: tensor for file in sorted(path.parent.glob(pattern)) for tensor in read_header(file)}
    if not isinstance(owners, Mapping):
        raise InvalidInput(str(path), found=f"no {key!r}", expected=expected, remedy="run again")
    return {str(name): tensors.get(owner) for name, owner in owners.items()}

"""How much each element of a model matters to what it says on a text: files of their own, beside no model.

A directory with ``importance.json`` and safetensors files: of each tensor of the model that was measured, under its
name and in its shape, float32, the mean over all positions of the squared derivative of the log-likelihood of what the
model itself would say there (the diagonal of its Fisher information). The JSON says by which tensor each is kept (a
head that is the embedding matters as one tensor)::

    {"positions": 2304, "tensors": {"lm_head.weight": "model.embed_tokens.weight", ...}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.checkpoint.safetensors_file import StoredTensor
from mergegate.merge_core.checkpoint.statistics_files import read_owners, write_owners
from mergegate.merge_core.errors import InvalidInput

IMPORTANCE = "importance.json"
FILES_OF_IMPORTANCE = "importance-*.safetensors"
_EXPECTED = "the importance of elements as mergegate measures it"


@dataclass(frozen=True, slots=True)
class ExpectedImportance:
    """The importance of a tensor's elements that is still to be measured, as far as a plan can know it.

    Args:
        shape: Of the tensor.
    """

    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of float32."""
        return 4 * math.prod(self.shape)


def importance_file_name(number: int) -> str:
    """Name of a file with the importance of a run of tensors; ``number`` from 0."""
    return f"importance-{number:05d}.safetensors"


def write_importance(directory: Path, tensors: Mapping[str, str], positions: int) -> None:
    """Write ``importance.json``: by which tensor each is kept; means are over so many positions."""
    write_owners(directory / IMPORTANCE, "tensors", tensors, positions)


def open_importance(directory: Path) -> dict[str, StoredTensor]:
    """What lies in ``directory``, by the name of the model's tensor.

    Raises:
        InvalidInput: Files that are missing or damaged, or do not belong together.
    """
    place = directory / IMPORTANCE
    found = {}
    for name, tensor in read_owners(place, "tensors", FILES_OF_IMPORTANCE, _EXPECTED).items():
        if tensor is None or tensor.dtype.code != "F32":
            raise InvalidInput(f"{place}: {name}", found="nothing of that name", expected=_EXPECTED, remedy="run again")
        found[name] = tensor
    return found

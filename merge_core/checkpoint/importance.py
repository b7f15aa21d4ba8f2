"""Read and write the importance of each element of a model, measured on a calibration text.

The importance is stored in its own directory, with ``importance.json`` and safetensors files. For each measured tensor,
the files contain a float32 tensor with the same name and shape. Its elements are the mean over all positions of the
squared derivative of the log-likelihood of the model's own prediction, which is the diagonal of its Fisher information.
The JSON maps each tensor of the model to the stored tensor, because a tied head and the embedding share one::

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
    """Placeholder in a plan for the importance of a tensor that has not been measured yet.

    Args:
        shape: Shape of the tensor.
    """

    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes, in float32."""
        return 4 * math.prod(self.shape)


def importance_file_name(number: int) -> str:
    """Return the name of the file with this number, from 0."""
    return f"importance-{number:05d}.safetensors"


def write_importance(directory: Path, tensors: Mapping[str, str], positions: int) -> None:
    """Write ``importance.json``.

    Args:
        directory: Directory of the files.
        tensors: Name of the stored tensor for each tensor of the model.
        positions: Number of positions that the means cover.
    """
    write_owners(directory / IMPORTANCE, "tensors", tensors, positions)


def open_importance(directory: Path) -> dict[str, StoredTensor]:
    """Return the stored importance by the name of the model's tensor.

    Raises:
        InvalidInput: Files are missing or damaged, or do not belong together.
    """
    path = directory / IMPORTANCE
    importance = {}
    for name, tensor in read_owners(path, "tensors", FILES_OF_IMPORTANCE, _EXPECTED).items():
        if tensor is None or tensor.dtype.code != "F32":
            raise InvalidInput(f"{path}: {name}", found="nothing of that name", expected=_EXPECTED, remedy="run again")
        importance[name] = tensor
    return importance
